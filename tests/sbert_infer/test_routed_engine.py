"""A `Router` in one file gives the vectors of sentence-transformers for each of its tasks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from click.testing import CliRunner
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Normalize, Router, Transformer
from sentence_transformers.sentence_transformer import evaluation
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from tokenizers import Tokenizer

from sbert_infer import ArtifactError, AsyncEngine, Engine, SbertInferWarning
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.onnx_file import open_routes
from sbert_infer.backends.onnxruntime_cpu import OnnxBackend
from sbert_infer.embed.embedder import Embedder
from sbert_infer.errors import CorruptError
from sbert_infer.export.cli import main
from sbert_infer.export.exporter import ExportOptions, export
from sbert_infer.export.families import family
from sbert_infer.verify.cli import main as verify
from tests.models.checkpoints import ODD_TEXTS, TEXTS
from tests.models.sparse_encoders import write_routes

Once = Callable[..., Path]
ALL_TEXTS = [*TEXTS, *ODD_TEXTS]


def quick_export(source: Path, target: Path, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "probe_texts", lambda *_: ALL_TEXTS)
        export(source, target, ExportOptions(**options))


@pytest.fixture(scope="module")
def checkpoint(once: Once, make_checkpoint: Callable[..., Path]) -> Path:
    """Queries by a table, documents by a transformer, which is the default."""

    def write(path: Path) -> None:
        source = make_checkpoint()
        tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        table = torch.randn(tokenizer.get_vocab_size(), 32, generator=torch.Generator().manual_seed(0))
        router = Router.for_query_document(
            [StaticEmbedding(tokenizer, embedding_weights=table)],
            [Transformer(str(source)), Pooling(32, pooling_mode="mean")],
        )
        model = SentenceTransformer(modules=[router, Normalize()], device="cpu", prompts={"query": "find: "})
        model.save(str(path), create_model_card=False)

    return once("dense routes", "router", write)


@pytest.fixture(scope="module")
def path(checkpoint: Path, once: Once) -> Path:
    return once("dense routes", "router.onnx", lambda target: quick_export(checkpoint, target))


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with Engine(path, on_truncate="ignore") as engine:
        yield engine


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return SentenceTransformer(str(checkpoint), device="cpu")


@pytest.mark.parametrize("method", ["encode_query", "encode_document", "encode"])
def test_vectors(engine: Engine, model: Any, method: str) -> None:
    for inputs in (ALL_TEXTS, TEXTS[0], []):
        found, expected = (getattr(each, method)(inputs) for each in (engine, model))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert not np.allclose(engine.encode_query(TEXTS), engine.encode_document(TEXTS), atol=0.1)
    found, expected = (each.encode(list(TEXTS), task="query", prompt="a: ") for each in (engine, model))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_an_evaluator(engine: Engine, model: Any) -> None:
    queries, corpus = {"q": TEXTS[0], "r": TEXTS[4]}, {str(i): text for i, text in enumerate(TEXTS)}
    evaluator: Any = evaluation.InformationRetrievalEvaluator(
        queries, corpus, {"q": {"3"}, "r": {"1"}}, write_csv=False
    )
    assert evaluator(engine) == pytest.approx(evaluator(model))


def test_settings_hold_for_every_route(path: Path, engine: Engine) -> None:
    engine.truncate_dim = 5
    engine.prompts = {"query": "about: "}
    with Engine(path) as other:
        whole = other.encode_query(list(TEXTS), prompt="about: ")
    np.testing.assert_array_equal(engine.encode_query(list(TEXTS)), whole[:, :5])
    assert engine.encode_document(TEXTS).shape == (len(TEXTS), 5)
    assert engine.last_stats.texts == len(TEXTS)
    engine.encode_query(TEXTS[:3])
    assert engine.last_stats.texts == 3
    with pytest.raises(ValueError, match="max_seq_length: not for router, which has several routes"):
        engine.max_seq_length = 9
    with copy.deepcopy(engine) as copied:
        np.testing.assert_array_equal(copied.encode_query(list(TEXTS)), whole[:, :5])
    engine.on_truncate = "warn"
    with pytest.warns(SbertInferWarning, match="1 of 1 texts were cut"):
        engine.encode_document(["word " * 1000])


def test_each_route_is_checked_by_itself(path: Path, engine: Engine) -> None:
    (part,) = open_routes(engine.artifact).values()
    assert part.sha256
    assert part.sha256 != engine.artifact.sha256
    checks: list[tuple[Any, str]] = [("always", "right"), ("never", "not checked")]
    for when, verdict in checks:
        with Engine(path, verify=when) as opened:
            verdicts = {opened.for_task(task).info["verified"]["verdict"] for task in ("query", "document")}
        assert verdicts == {verdict}


def test_sbert_verify_runs_every_route(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = OnnxBackend.run

    def spoil_queries(self: OnnxBackend, *args: Any, **options: Any) -> Any:
        found = run(self, *args, **options)
        is_query = getattr(self._model, "part", None) is not None
        return [rows[:, ::-1] for rows in found] if is_query else found

    right = CliRunner().invoke(verify, [str(path), "--json"])
    assert (right.exit_code, json.loads(right.stdout)["target"]) == (0, "this machine")
    monkeypatch.setattr(OnnxBackend, "run", spoil_queries)
    wrong = CliRunner().invoke(verify, [str(path), "--json"])
    assert (wrong.exit_code, json.loads(wrong.stdout)["target"]) == (1, "this machine, route query")


def test_sbert_verify_compares_no_file_with_several_routes(path: Path) -> None:
    done = CliRunner().invoke(verify, [str(path), "http://127.0.0.1:9"])
    assert done.exit_code == 1
    assert "a comparison with a server or a file can't choose" in done.stderr


def test_close(path: Path) -> None:
    engine = Engine(path)
    engine.close()
    engine.close()
    for encode in (engine.encode_query, engine.encode_document):
        with pytest.raises(Exception, match="closed"):
            encode("a")


def test_the_file_is_an_ordinary_onnx_model(path: Path, engine: Engine) -> None:
    """It is that of the default route: other programs do not see the other one."""
    assert onnx.load(str(path)).graph.output[0].name == "sentence_embedding"
    session = onnxruntime.InferenceSession(str(path))
    ids = np.array([engine.pipeline.tokenizer.backend.encode(TEXTS[0]).ids])
    found = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]
    np.testing.assert_allclose(found[0], engine.encode_document(TEXTS[0]), rtol=0, atol=1e-5)


def test_damage_is_found(path: Path, tmp_path: Path) -> None:
    content = bytearray(path.read_bytes())
    start, stop = open_artifact(path).manifest.other_routes["query"]  # type: ignore[index]
    content[(start + stop) // 2] ^= 1
    (tmp_path / "damaged.onnx").write_bytes(content)
    with pytest.raises(CorruptError, match="its bytes have changed"):
        Engine(tmp_path / "damaged.onnx")


def test_who_can_not_choose_a_route(path: Path, engine: Engine, tmp_path: Path) -> None:
    why = "router.onnx has the routes document and query, and .* can't choose: export each by itself, with sbert-export"
    for opened in (path, engine):
        with pytest.raises(ArtifactError, match=why):
            AsyncEngine(opened)
    with pytest.raises(ArtifactError, match=why):
        Embedder(path)
    result = CliRunner().invoke(main, [str(path), "--triton-repository", str(tmp_path / "triton")])
    assert result.exit_code == 1
    assert "a Triton repository can't choose" in result.output


def test_precisions(checkpoint: Path, path: Path, tmp_path: Path) -> None:
    """The table of queries stays in FP32."""
    quick_export(checkpoint, tmp_path / "router.int8.onnx", int8=True, min_cosine=0.9)
    with Engine(tmp_path / "router.int8.onnx") as small, Engine(path) as exact:
        assert small.manifest.precision == "int8"
        np.testing.assert_array_equal(small.encode_query(TEXTS), exact.encode_query(TEXTS))
        cosines = (small.encode_document(TEXTS) * exact.encode_document(TEXTS)).sum(axis=1)
        assert 0.9 < cosines.min() < 0.99999
    shown = CliRunner().invoke(main, ["--inspect", str(tmp_path / "router.int8.onnx")]).output
    assert "document (default), described here; query, " in shown
    refused = CliRunner().invoke(main, [str(checkpoint), "--fp16", "-o", str(tmp_path / "x.plan")])
    assert refused.exit_code == 1
    assert "--fp16 takes one route at a time: --route query, --route document, each with -o" in refused.output
    assert [file.name for file in tmp_path.iterdir()] == ["router.int8.onnx"]


def test_sparse_routes(once: Once) -> None:
    folder = once("sparse routes", "routes", lambda path: write_routes(path, prompts={"query": "find: "}))
    path = once("sparse routes", "routes.onnx", lambda target: quick_export(folder, target))
    model: Any = SparseEncoder(str(folder), device="cpu")
    with Engine(path, on_truncate="ignore", max_active_dims=9) as engine:
        for method in ("encode_query", "encode_document", "encode"):
            found = getattr(engine, method)(ALL_TEXTS, convert_to_sparse_tensor=False)
            expected = getattr(model, method)(ALL_TEXTS, convert_to_sparse_tensor=False, max_active_dims=9)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert engine.decode(engine.encode_query("A cat"))


def test_what_a_killed_export_left_goes_with_the_next(checkpoint: Path, tmp_path: Path) -> None:
    left = tmp_path / ".router.onnx.left.staging"
    left.mkdir()
    (left / "query0.onnx").write_bytes(b"a part")
    quick_export(checkpoint, tmp_path / "router.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["router.onnx"]
