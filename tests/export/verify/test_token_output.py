"""`--outputs sentence,tokens`: the graph gives token vectors, too, and nothing else changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from sentence_transformers import SentenceTransformer

from sbert_infer import AsyncEngine, Engine, SbertInferWarning
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.manifest import Manifest
from sbert_infer.errors import ExportError, ParityError, TruncationError
from sbert_infer.export import exporter
from sbert_infer.export.cli import main
from sbert_infer.export.exporter import ExportOptions, export
from sbert_infer.export.families import sentence
from sbert_infer.serve.settings import ModelFile, Settings
from tests.models.checkpoints import ODD_TEXTS, TEXTS
from tests.models.graphs import Array, assert_close, open_session, tokens
from tests.sbert_infer.serve.conftest import start

MakeCheckpoint = Callable[..., Path]

ALL_TEXTS = [*TEXTS, *ODD_TEXTS]
BOTH = ("sentence_embedding", "token_embeddings")
OPTIONS: dict[str, Any] = {"layer_pooling": 1, "pooling": ("cls",), "include_prompt": False, "max_length": 24}


@pytest.fixture(scope="module")
def exported(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint whose token vectors are not just the last layer's, and its artifact."""
    checkpoint, path = make_checkpoint(**OPTIONS), tmp_path_factory.mktemp("tokens") / "tokens.onnx"
    arguments = [str(checkpoint), "-o", str(path), "-q", "--outputs", "sentence, tokens"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return checkpoint, path


def rows(path: Path, texts: list[str]) -> list[Array]:
    """The graph's vectors of each text's real tokens."""
    inputs = tokens(path, texts)
    found = open_session(path).run(["token_embeddings"], inputs)[0]
    return [vectors[mask == 1] for vectors, mask in zip(found, inputs["attention_mask"], strict=True)]


def test_token_vectors(exported: tuple[Path, Path]) -> None:
    checkpoint, path = exported
    model = SentenceTransformer(str(checkpoint), device="cpu")
    expected = model.encode(ALL_TEXTS, output_value="token_embeddings")
    for found, right in zip(rows(path, ALL_TEXTS), expected, strict=True):
        assert found.shape == right.shape
        assert_close(found, right.numpy(), 1e-5)


def test_sentence_vectors(exported: tuple[Path, Path]) -> None:
    checkpoint, path = exported
    outputs = {value.name: value.shape for value in open_session(path).get_outputs()}
    assert outputs == dict(zip(BOTH, (["batch", 32], ["batch", "length", 32]), strict=True))
    with Engine(path, on_truncate="ignore") as engine:
        assert engine.manifest.outputs == BOTH
        expected = SentenceTransformer(str(checkpoint), device="cpu").encode(ALL_TEXTS)
        assert_close(engine.encode(ALL_TEXTS), expected, 1e-5)


@pytest.mark.parametrize("prompt", [None, "query: "])
def test_the_engine_gives_token_vectors(exported: tuple[Path, Path], prompt: str | None) -> None:
    checkpoint, path = exported
    model = SentenceTransformer(str(checkpoint), device="cpu")
    options: dict[str, Any] = {"output_value": "token_embeddings", "prompt": prompt}
    with Engine(path, on_truncate="ignore") as engine:
        found, expected = engine.encode(ALL_TEXTS, **options), model.encode(ALL_TEXTS, **options)
        assert [vectors.shape for vectors in found] == [tuple(vectors.shape) for vectors in expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs.numpy(), 1e-5)
        one = engine.encode(TEXTS[0], convert_to_tensor=True, **options)
        assert_close(one.numpy(), found[0], 1e-5)
        assert engine.encode([], **options) == []
        with pytest.raises(ValueError, match="normalize_embeddings, truncate_dim: not with output_value"):
            engine.encode(TEXTS, normalize_embeddings=True, truncate_dim=8, **options)
    with Engine(path, on_truncate="error") as engine, pytest.raises(TruncationError, match="text 1 "):
        engine.encode(["short", "long " * 99], **options)


def test_token_vectors_over_http(exported: tuple[Path, Path]) -> None:
    path = exported[1]
    running = start(Settings((ModelFile(path, "tokens"),), port=0))
    try:
        answer = running.post("/embed_all", {"inputs": TEXTS, "truncate": True})
        refused = running.post("/embed_all", {"inputs": ["short", "long " * 99], "truncate": False})
        ask = {"inputs": [TEXTS[0] + " long" * 99], "truncate": True, "truncation_direction": "left"}
        end = running.post("/embed_all", ask).json()[0]
    finally:
        running.stop()
    with Engine(path, on_truncate="ignore") as engine:
        expected = engine.encode(TEXTS, prompt="", output_value="token_embeddings")
        same = engine.encode(" long" * 99, prompt="", output_value="token_embeddings")
    assert answer.status_code == 200
    for found, right in zip(answer.json(), expected, strict=True):
        assert_close(np.array(found, np.float32), right, 1e-6)
    assert_close(np.array(end, np.float32), same, 1e-6)
    assert refused.status_code == 413
    assert "input 1 is longer than the model's limit: it has more than 24 tokens" in refused.json()["error"]


def test_token_vectors_of_many_callers_say_what_was_cut(exported: tuple[Path, Path]) -> None:
    async def run() -> int:
        async with AsyncEngine(exported[1]) as engine:
            await engine.token_vectors(["short", "long " * 99])
            return engine.stats().truncated

    with pytest.warns(SbertInferWarning, match="1 of 2 texts were cut to 24 tokens"):
        assert asyncio.run(run()) == 1


def test_manifests_without_outputs_stay_readable(exported: tuple[Path, Path]) -> None:
    """Older manifests without `outputs` are readable, and plain artifacts are still written so."""
    manifest = open_artifact(exported[1]).manifest
    plain = replace(manifest, outputs=("sentence_embedding",))
    assert '"outputs"' in manifest.to_json()
    assert '"outputs"' not in plain.to_json()
    assert Manifest.from_json(plain.to_json()) == plain
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_wrong_token_vectors_are_refused(
    exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused even if the sentence vectors are right."""
    model = onnx.load(exported[1])
    del model.metadata_props[:]
    (output,) = (node for node in model.graph.node if "token_embeddings" in node.output)
    for node in model.graph.node:
        node.input[:] = ["right" if name == "token_embeddings" else name for name in node.input]
    output.output[list(output.output).index("token_embeddings")] = "right"
    model.graph.node.append(onnx.helper.make_node("Sin", ["right"], ["token_embeddings"]))
    monkeypatch.setattr(sentence, "convert", lambda reference, **options: ir.from_proto(model))
    monkeypatch.setattr(exporter, "tune", lambda converted: converted)
    with pytest.raises(ParityError, match="lowest cosine of a token's vector"):
        export(exported[0], tmp_path / "wrong.onnx", ExportOptions(outputs=("sentence", "tokens")))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outputs": ("sentence", "words")}, "takes sentence and tokens, got 'words'"),
        ({"outputs": ("tokens",)}, "must name sentence"),
        ({"outputs": ("sentence", "tokens"), "fp16": True}, "for --fp16 nothing else"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        ExportOptions(**options)
