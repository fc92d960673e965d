"""Multi-vector encoders: every layout, equal to sentence-transformers' `MultiVectorEncoder`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import onnx
import pytest
import torch
from click.testing import CliRunner
from sentence_transformers import MultiVectorEncoder
from torch import nn

from sbert_infer.artifact import open_artifact
from sbert_infer.errors import CheckpointError, ExportError, ParityError
from sbert_infer.export.cli import main
from sbert_infer.export.exporter import ExportOptions, export
from sbert_infer.export.families import family
from sbert_infer.export.families.cross_encoder.checkpoint import is_cross_encoder
from sbert_infer.export.families.multi_vector.checkpoint import is_multi_vector, read_multi_vector
from sbert_infer.export.families.multi_vector.parity import certify_multi_vector, expect_vectors
from sbert_infer.export.families.multi_vector.reference import MultiVectorReference, load_multi_vector_reference
from sbert_infer.export.verify.parity import Bounds
from tests.models.checkpoints import edit_json
from tests.models.graphs import assert_close
from tests.models.multi_vectors import (
    ALL_TEXTS,
    FIXED,
    export_multi_vector,
    one_thread,
    write_multi_vector,
    write_pylate,
    write_stanford,
)

NATIVE: dict[str, dict[str, Any]] = {
    "fixed expansion": FIXED,
    "attended, at least": {
        "query_expansion": {"strategy": "min", "length": 12, "attend": True, "token": "[SEP]"},
        "query_length": 20,
        "mask": {"skiplist_words": [".", "the"], "skiplist_tasks": ["query", "document"]},
        "similarity": "meanmaxsim",
    },
    "no limit, at least": {"query_expansion": {"strategy": "min", "length": 24}, "mask": {}},
    "lengths alone": {"query_length": 8, "document_length": 30},
    "bare": {"dense": (), "normalize": False},
    "two layers": {"dense": ({"out_features": 24}, {"out_features": 8, "activation_function": nn.GELU()}), "mask": {}},
    "causal": {"family": "qwen3", "query_expansion": {"strategy": "fixed", "length": 16}, "mask": {}},
    "positions after padding": {"family": "roberta", **FIXED},
}
PYLATE: dict[str, dict[str, Any]] = {
    "defaults": {"query_length": 20, "document_length": 33, "attend_to_expansion_tokens": False},
    "old": {"model_type": None, "query_length": 12, "skiplist_words": ["the", "."], "attend_to_expansion_tokens": True},
    "no expansion": {"do_query_expansion": False, "query_length": 9, "prompts": {"query": "[Q] find: "}},
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def assert_equal(reference: MultiVectorReference, folder: Path) -> None:
    """In each role, with the model's own prompts."""
    model = MultiVectorEncoder(str(folder), device="cpu")
    for task in ("query", "document", None):
        prompt = model.prompts.get(task or "", "")
        assert task is None or reference.checkpoint.prompts[task] == prompt
        expected = model.encode(ALL_TEXTS, task=task, prompt=prompt, convert_to_numpy=True)
        found = reference.encode(ALL_TEXTS, task or "none", prompt=prompt)
        assert [vectors.shape for vectors in found] == [vectors.shape for vectors in expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs, 1e-6)
    assert reference.checkpoint.similarity == model.similarity_fn_name


@pytest.mark.parametrize("name", NATIVE)
def test_reference(name: str, tmp_path: Path) -> None:
    folder = write_multi_vector(tmp_path / "colbert", **NATIVE[name])
    assert is_multi_vector(folder)
    assert_equal(load_multi_vector_reference(read_multi_vector(folder)), folder)


@pytest.mark.parametrize("name", PYLATE)
def test_reference_of_pylate(name: str, tmp_path: Path) -> None:
    folder = write_pylate(tmp_path / "colbert", **PYLATE[name])
    assert is_multi_vector(folder)
    reference = load_multi_vector_reference(read_multi_vector(folder))
    assert len(reference.tokenizer("[Q] a")["input_ids"]) == 4  # the mark is one token
    assert_equal(reference, folder)


STANFORD: dict[str, dict[str, Any] | None] = {
    "defaults": None,
    "metadata": {
        "query_token_id": "the",
        "doc_token_id": "[MASK]",
        "query_maxlen": 20,
        "doc_maxlen": 40,
        "attend_to_mask_tokens": True,
        "mask_punctuation": False,
        "similarity": "cosine",
        "lr": 1e-5,
    },
}


@pytest.mark.parametrize("name", STANFORD)
def test_reference_of_stanford(name: str, tmp_path: Path) -> None:
    folder = write_stanford(tmp_path / "colbert", metadata=STANFORD[name])
    assert is_multi_vector(folder)
    assert not is_cross_encoder(folder)
    assert_equal(load_multi_vector_reference(read_multi_vector(folder)), folder)


def test_stanford_layout_refused(tmp_path: Path) -> None:
    folder = write_stanford(tmp_path / "colbert", metadata={"similarity": "l2"})
    weights = torch.load(folder / "pytorch_model.bin")
    torch.save(
        {name: tensor for name, tensor in weights.items() if name != "linear.weight"}, folder / "pytorch_model.bin"
    )
    with pytest.raises(CheckpointError, match=r"the similarity 'l2' is not supported(?s:.)*lack 'linear.weight'"):
        read_multi_vector(folder)


@pytest.fixture
def native(once: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint that the test may change."""
    folder = once("multi vector", "colbert", lambda target: write_multi_vector(target, **FIXED))
    return Path(shutil.copytree(folder, tmp_path / "colbert"))


def test_max_length(native: Path) -> None:
    roles = read_multi_vector(native, max_length=30).roles
    assert {task: role.max_length for task, role in roles.items()} == {"query": 16, "document": 30, "none": 30}
    edit_json(native / "sentence_bert_config.json", document_length=300)  # more than the model's table of positions
    assert read_multi_vector(native).roles["document"].max_length == 64


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config_sentence_transformers.json", {"future": 1}, "unknown key 'future'"),
        ("config_sentence_transformers.json", {"query_prefix": "[Q] "}, "unknown key 'query_prefix'"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "cosine"}, "unknown similarity 'cosine'"),
        ("sentence_bert_config.json", {"query_length": "long"}, "'query_length' must be a positive integer"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "most"}}, "with a fixed or min strategy"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "min"}}, "needs a positive 'length'"),
        (
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "fixed", "length": 99}},
            "asks for 99 tokens, but the model allows 64",
        ),
        (
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "fixed", "length": 9, "token": "[FILL]"}},
            "which the tokenizer does not know",
        ),
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [3]}, "'keep_only_token_ids' is for images"),
        ("2_MultiVectorMask/config.json", {"skiplist_tasks": ["title"]}, "names 'title'"),
        ("2_MultiVectorMask/config.json", {"future": 1}, "unknown key 'future'"),
        ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "only 'token_embeddings' is supported"),
        ("3_Normalize/config.json", {"module_input_name": "sentence_embedding"}, "only 'token_embeddings'"),
    ],
)
def test_what_is_not_understood_is_refused(native: Path, file: str, changes: dict[str, Any], message: str) -> None:
    edit_json(native / file, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_multi_vector(native)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling", "merges a document's vectors"),
        ("sentence_transformer.modules.pooling.Pooling", "Pooling is not supported in a multi-vector encoder"),
    ],
)
def test_other_modules_are_refused(native: Path, kind: str, message: str) -> None:
    file = native / "modules.json"
    file.write_text(file.read_text().replace("base.modules.normalize.Normalize", kind))
    with pytest.raises(CheckpointError, match=message):
        read_multi_vector(native)


def test_an_expansion_that_would_not_count_is_refused(tmp_path: Path) -> None:
    folder = write_multi_vector(tmp_path / "colbert", query_expansion={"strategy": "fixed", "length": 9})
    with pytest.raises(CheckpointError, match="no MultiVectorMask would let the expansion count"):
        read_multi_vector(folder)


@pytest.mark.parametrize(("options", "message"), [({"fp16": True}, "--fp16 is"), ({"route": "query"}, "--route are")])
def test_options_of_sentence_encoders(native: Path, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        export(native, tmp_path / "model.onnx", ExportOptions(**options))
    assert [path.name for path in tmp_path.iterdir()] == ["colbert"]


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification with a few texts instead of hundreds."""
    monkeypatch.setattr(family, "probe_texts", lambda *_: ALL_TEXTS)


@pytest.mark.usefixtures("few_texts")
def test_command(native: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.onnx"
    result = CliRunner().invoke(main, [str(native), "-o", str(target), "--int8", "--min-cosine", "0.9"])
    assert result.exit_code == 0, result.output
    assert "bert multi-vector encoder, 16 dimensions, 16 and 40 tokens" in result.output
    assert "encode_query" in result.output
    shown = CliRunner().invoke(main, ["--inspect", str(target)]).output
    assert "16 dimensions for each token, scaled to length 1, maxsim" in shown
    assert "query     up to 16 tokens, filled up to 16 tokens" in shown
    manifest = open_artifact(target).manifest
    assert (manifest.kind, manifest.precision, manifest.outputs) == ("multi_vector", "int8", ("token_embeddings",))
    assert 0.9 < manifest.parity["min_cosine"] < 0.9999
    assert [value.name for value in onnx.load(target).graph.output] == ["token_embeddings"]


@pytest.mark.parametrize("wrong", ["vectors", "tokens"])
def test_a_wrong_artifact_is_refused(once: Callable[..., Path], wrong: str) -> None:
    folder, path = export_multi_vector(once, **FIXED)
    reference = load_multi_vector_reference(read_multi_vector(folder))
    certify_multi_vector(path, expect_vectors(reference, ALL_TEXTS), Bounds.everywhere(0.9999))
    if wrong == "vectors":
        with torch.no_grad():
            cast(Any, reference.encoder).embeddings.word_embeddings.weight[7:50] *= -1
    else:
        document = replace(reference.checkpoint.roles["document"], skip_ids=())
        reference.checkpoint.roles["document"] = document
    with pytest.raises(
        ParityError,
        match="lowest cosine of a token" if wrong == "vectors" else "18 vectors of 16 numbers in PyTorch, 17 ",
    ):
        certify_multi_vector(path, expect_vectors(reference, ALL_TEXTS), Bounds.everywhere(0.9999))
