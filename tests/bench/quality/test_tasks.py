"""Quality without speed, and rerankers: real small models, against sentence-transformers and its evaluators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from sbert_infer import Engine
from sbert_infer.artifact.onnx_file import open_artifact
from sbert_infer.bench import cli, session
from sbert_infer.bench.contest.lineup import EAGER, Contestant, line_up
from sbert_infer.bench.contest.models_under_test import ModelsUnderTest
from sbert_infer.bench.errors import BenchError
from sbert_infer.bench.inside.pair_loaders import LOADERS
from sbert_infer.bench.quality.beir import read_beir
from sbert_infer.bench.quality.labelled_pairs import read_scores
from sbert_infer.bench.quality.tasks import RetrievalTask
from sbert_infer.bench.report.page import render_page
from sbert_infer.bench.report.results import QUALITY, Results, load_results
from sbert_infer.bench.report.table import render_table
from sbert_infer.bench.session import Settings, run_session
from sbert_infer.bench.workloads import make_pairs, make_workload
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
    """What sentence-transformers' own evaluators say of its own vectors."""
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


# Rerankers ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reranker_run(reranker: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    artifact = open_artifact(reranker.with_suffix(".onnx"))
    spec = {"kind": "fake", "pairs": True, "artifact": str(artifact.path), "error": 0.5}
    folder = tmp_path_factory.mktemp("rerankers")
    settings = Settings(
        rounds=1, latency_texts=5, sts=(write_sts(folder / "scored.tsv"),), only=("sbert-infer", "fake")
    )
    workloads = {"mixed": make_workload("mixed", 20)}
    models = ModelsUnderTest("tiny", str(reranker), (artifact,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "RemoteWorker", WorkerInside)
        return run_session(models, workloads, settings, folder, extra=[Contestant("fake", "fp32", spec)])


def test_rerankers_score_pairs_side_by_side(reranker_run: Results) -> None:
    rows = {row.contestant: row for row in reranker_run.rows}
    assert set(rows) == {EAGER, "sbert-infer fp32", "fake"}
    for row in (rows[EAGER], rows["sbert-infer fp32"]):
        assert row.status == "ok", row.reason
        assert row.max_error is not None
        assert row.max_error < 1e-5
        assert row.texts_per_s
        assert row.peak_share
        assert row.latency_ms
        assert row.quality == pytest.approx(rows[EAGER].quality, abs=5e-5)
    assert reranker_run.workloads[0].texts == 20


def test_the_rival_is_called_for_the_same_scores(reranker: Path) -> None:
    """In this process, which has imported it already. The line-up has it, and its batch size is to be tuned."""
    artifact = open_artifact(reranker.with_suffix(".onnx"))
    checkpoint = {"model": str(reranker), "checkpoint": str(reranker), "pairs": True}
    everyone = line_up([artifact], checkpoint, {"available": False})
    assert [one.name for one in everyone] == [EAGER, "sbert-infer fp32", "sentence-transformers CrossEncoder"]
    assert everyone[-1].tunable
    pairs = [list(pair) for pair in make_pairs(make_workload("mixed", 20))]
    ours, theirs = (LOADERS[one.spec["kind"]](dict(one.spec)) for one in everyone[1:])
    for prompt in (None, "find: "):
        assert np.abs(ours(pairs, 4, prompt) - theirs(pairs, 4, prompt)).max() < 1e-5


def test_wrong_scores_are_shown_as_wrong_though_they_correlate(reranker_run: Results) -> None:
    [row] = [row for row in reranker_run.rows if row.contestant == "fake"]
    assert row.status == "wrong"
    assert row.correlation == pytest.approx(1)
    assert "scores off by up to 0.5" in row.reason


def test_the_report_speaks_of_pairs(reranker_run: Results) -> None:
    table = render_table(reranker_run)
    assert "pairs/s" in table
    assert "max error" in table
    assert "20 pairs" in table
    assert "texts/s" not in table
    assert "pairs per second" in render_page(reranker_run)


def test_a_reranker_searches_no_corpus(reranker: Path, tmp_path: Path) -> None:
    models = ModelsUnderTest("tiny", str(reranker), (open_artifact(reranker.with_suffix(".onnx")),))
    with pytest.raises(BenchError, match="can't search"):
        run_session(models, {}, Settings(beir=(write_beir(tmp_path / "tiny"),)), tmp_path)
