"""Quality without speed: real small models, against sentence-transformers' evaluators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from sbert_infer import Engine
from sbert_infer.bench import cli, session
from sbert_infer.bench.contest.lineup import EAGER
from sbert_infer.bench.quality.beir import read_beir
from sbert_infer.bench.quality.labelled_pairs import read_scores
from sbert_infer.bench.quality.tasks import RetrievalTask
from sbert_infer.bench.report.page import render_page
from sbert_infer.bench.report.results import QUALITY, load_results
from sbert_infer.bench.workloads import make_workload
from tests.bench.conftest import WorkerInside, write_beir, write_sts

PROMPTS = {"query": "find this: ", "document": "text: "}


def write_labels(file: Path) -> Path:
    texts = make_workload("short", 20)
    lines = [f"{a}\t{b}\t{number % 3 % 2}\n" for number, (a, b) in enumerate(zip(texts, texts[3:], strict=False))]
    file.write_text("".join(lines), encoding="utf-8")
    return file


def test_the_command_measures_quality_alone(
    make_checkpoint: Callable[..., Path],
    export_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "RemoteWorker", WorkerInside)
    artifact, checkpoint = export_checkpoint("bert", prompts=PROMPTS), make_checkpoint("bert", prompts=PROMPTS)
    scored, labelled, beir = (
        write_sts(tmp_path / "a.tsv"),
        write_labels(tmp_path / "b.tsv"),
        write_beir(tmp_path / "c", overlap=False),
    )
    data = ["--sts", scored, "--sts", write_sts(tmp_path / "d.tsv"), "--pairs", labelled, "--beir", beir]
    options = ["--only", "sbert-infer", "--json", tmp_path / "q.json"]
    arguments = [artifact, "--checkpoint", checkpoint, "--only-quality", *data, *options]
    done = CliRunner().invoke(cli.run, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    results = load_results(tmp_path / "q.json")
    rows = {row.contestant: row for row in results.of(QUALITY)}
    assert set(rows) == {EAGER, "sbert-infer fp32"}
    expected = expected_quality(checkpoint, scored, labelled, beir)
    for row in rows.values():
        assert row.status == "ok"
        assert {name: row.quality[name] for name in expected} == pytest.approx(expected, abs=5e-5)
        assert row.quality["mean Spearman"] == pytest.approx(row.quality["a Spearman"])  # twice the same pairs
    assert "a Spearman" in done.output
    assert "texts/s" not in done.output
    assert "All figures" in render_page(results)


def expected_quality(checkpoint: Path, scored: Path, labelled: Path, beir: Path) -> dict[str, float]:
    """Measures of sentence-transformers' own vectors by its own evaluators."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import evaluation

    model = SentenceTransformer(str(checkpoint), device="cpu")
    pairs, data = read_scores(scored), read_beir(beir)
    left, right, labels = zip(*(line.split("\t") for line in labelled.read_text().splitlines()), strict=True)
    relevant = {query: {key for key, grade in grades.items() if grade} for query, grades in data.grades.items()}
    options = {"show_progress_bar": False}
    sts = evaluation.EmbeddingSimilarityEvaluator(pairs.left, pairs.right, pairs.values, **options)
    binary = evaluation.BinaryClassificationEvaluator(left, right, list(map(int, labels)), **options)
    corpus = dict(data.documents())
    retrieval = evaluation.InformationRetrievalEvaluator(data.queries, corpus, relevant, mrr_at_k=[10], **options)
    found = {**sts(model), **binary(model), **retrieval(model)}
    wanted = {"a Spearman": "spearman_cosine", "b AP": "cosine_ap", "c MRR@10": "cosine_mrr@10"}
    return {mine: float(found[theirs]) for mine, theirs in wanted.items()}


def test_retrieval_is_that_of_trec_eval(export_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    trec = pytest.importorskip("pytrec_eval")
    data = read_beir(write_beir(tmp_path / "tiny"))
    with Engine(export_checkpoint("bert"), on_truncate="ignore") as engine:
        task = RetrievalTask(data, "cosine")
        scorer = task.scorer()
        for block in task.blocks():
            scorer.add(block, engine.encode([str(text) for text in block.texts]))
        documents = dict(data.documents())
        scores = engine.similarity(engine.encode(list(data.queries.values())), engine.encode(list(documents.values())))
    run = {
        query: {key: float(score) for key, score in zip(documents, row, strict=True) if key != query}
        for query, row in zip(data.queries, scores, strict=True)
    }
    names = {"ndcg_cut_10": "nDCG@10", "recall_10": "recall@10", "recall_100": "recall@100"}
    found = trec.RelevanceEvaluator(data.grades, {"ndcg_cut.10", "recall.10,100"}).evaluate(run)
    expected = {
        f"tiny {mine}": sum(one[theirs] for one in found.values()) / len(found) for theirs, mine in names.items()
    }
    measures = scorer.measures()
    assert {name: measures[name] for name in expected} == pytest.approx(expected)
