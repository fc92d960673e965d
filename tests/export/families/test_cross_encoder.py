"""Cross-encoders from checkpoint to artifact: layouts, graphs, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

from sbert_infer import CheckpointError, ExportError, ParityError, Reranker
from sbert_infer.artifact import open_artifact
from sbert_infer.export.cli import main
from sbert_infer.export.exporter import ExportOptions, export
from sbert_infer.export.families.cross_encoder import parity
from sbert_infer.export.families.cross_encoder.checkpoint import is_cross_encoder, read_cross_encoder
from sbert_infer.export.families.cross_encoder.family import CrossEncoder
from sbert_infer.export.families.cross_encoder.parity import probe_pairs
from sbert_infer.export.families.cross_encoder.reference import load_pair_reference
from sbert_infer.export.graph.fuse import count_fused
from sbert_infer.export.verify.parity import in_batches
from tests.models.checkpoints import edit_json
from tests.models.cross_encoders import LAYOUTS, PAIRS, cross_encoder, write_cross_encoder
from tests.models.families import MAX_LENGTH
from tests.models.graphs import nodes, open_session


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder as sentence-transformers saves it today. Shared: change only a copy."""
    return write_cross_encoder(tmp_path_factory.mktemp("cross") / "bert")


@pytest.fixture
def copy(bert: Path, tmp_path: Path) -> Path:
    """A copy of `bert`."""
    return Path(shutil.copytree(bert, tmp_path / "copy"))


@pytest.fixture(scope="module")
def fused(bert: Path) -> bytes:
    """Its converted graph: tracing takes seconds."""
    model = CrossEncoder.read(bert, ExportOptions())
    model.load()
    graph = model.trace()
    return bytes(ir.to_proto(graph).SerializeToString())


@pytest.fixture
def traced(fused: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let exports start from that graph."""

    def load(*_: Any, **options: Any) -> ir.Model:
        return ir.from_proto(onnx.load_from_string(fused))

    monkeypatch.setattr(CrossEncoder, "trace", load)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("labels", "activation"), [(1, None), (1, nn.Identity()), (3, None), (3, nn.Sigmoid())])
def test_every_layout(tmp_path: Path, layout: str, labels: int, activation: nn.Module | None) -> None:
    folder = write_cross_encoder(tmp_path / "model", "roberta", labels=labels, layout=layout, activation=activation)
    found, expected = read_cross_encoder(folder), cross_encoder(folder)
    assert is_cross_encoder(folder)
    assert found.activation == type(expected.activation_fn).__name__.lower()
    assert found.labels == tuple(expected.model.config.id2label.values())
    assert found.max_length == expected.max_seq_length
    scores = load_pair_reference(found).score(PAIRS[:4])
    raw = expected.predict(PAIRS[:4], activation_fn=nn.Identity())
    np.testing.assert_allclose(scores, raw.reshape(scores.shape), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "in_head"), [("electra", 1), ("roberta", 0)])
def test_the_head_counts(tmp_path: Path, family: str, in_head: int) -> None:
    """The GELU of ELECTRA's head is in no config."""
    model = CrossEncoder.read(write_cross_encoder(tmp_path / family, family), ExportOptions())
    model.load()
    reference = model.reference
    fused = count_fused(model.trace(), reference.layers, reference.gelu_layers)
    assert fused.gelu == fused.gelu_layers == reference.layers + in_head


def test_a_sentence_encoder_is_not_one(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    assert not is_cross_encoder(make_checkpoint())
    assert not is_cross_encoder(make_checkpoint(layout="old"))
    assert not is_cross_encoder(tmp_path)


def test_prompts_are_read(tmp_path: Path) -> None:
    prompts = {"query": "find: ", "other": "sort: "}
    folder = write_cross_encoder(tmp_path / "model", prompts=prompts, default_prompt_name="other")
    checkpoint = read_cross_encoder(folder)
    assert (checkpoint.prompts, checkpoint.default_prompt_name) == (prompts, "other")


def _edit(name: str, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / name, **changes)


def _add_module(kind: str) -> Callable[[Path], None]:
    types = ["sentence_transformers.base.modules.transformer.Transformer", f"sentence_transformers.x.{kind}"]
    modules = [{"idx": i, "name": str(i), "path": f"{i}_x" if i else "", "type": t} for i, t in enumerate(types)]

    def change(folder: Path) -> None:
        (folder / "modules.json").write_text(json.dumps(modules))

    return change


def _without_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "pooler" not in k}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_edit("config_sentence_transformers.json", activation_fn="my.own.Act"), "function 'my.own.Act' is not supp"),
        (_edit("config_sentence_transformers.json", activation_fn="torch.nn.ReLU"), "'torch.nn.ReLU' is not supported"),
        (_edit("config_sentence_transformers.json", new_thing=1), "unknown key 'new_thing'"),
        (_edit("config_sentence_transformers.json", prompts={"a": 1}), "prompt 'a' must be a string"),
        (_edit("sentence_bert_config.json", transformer_task="fill-mask"), "only 'sequence-classification' is"),
        (_edit("config.json", architectures=["BertModel"]), "architecture BertModel is not one for sequence class"),
        (_edit("tokenizer_config.json", model_max_length=4), "a pair of texts needs at least 5 tokens"),
        (_add_module("LogitScore"), "LogitScore of a cross-encoder is not supported .it reads a score"),
        (_add_module("Dense"), "Dense of a cross-encoder is not supported"),
        (_without_head, "weights lack 'bert.pooler.dense.bias'"),
    ],
)
def test_what_is_refused(copy: Path, tmp_path: Path, change: Callable[[Path], None], message: str) -> None:
    change(copy)
    with pytest.raises(CheckpointError, match=message):
        export(copy, tmp_path / "x.onnx")
    assert not (tmp_path / "x.onnx").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp16": True}, "--fp16 is not supported for cross-encoders"),
        ({"outputs": ("sentence", "tokens")}, "--outputs and --route are for sentence encoders"),
        ({"int8": True, "calibration": ["a\tb", "no tab"]}, "text 2: a cross-encoder needs two texts with a tab"),
    ],
)
@pytest.mark.usefixtures("traced")
def test_options_that_are_refused(bert: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export(bert, tmp_path / "x.onnx", ExportOptions(**options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("traced")
def test_the_command(bert: Path, tmp_path: Path) -> None:
    """From the folder to a file that any onnxruntime runs, with its summary."""
    target = tmp_path / "bert.onnx"
    done = CliRunner().invoke(main, [str(bert), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert f"Reranker({str(target)!r}).rank(query, [...])" in done.output
    assert "100.00% in the same order" in done.output
    shown = CliRunner().invoke(main, ["--inspect", str(target)]).output
    assert f"pairs of up to {MAX_LENGTH} tokens, activation sigmoid" in shown
    assert "LABEL_0" in shown

    session = open_session(target)
    assert [value.name for value in session.get_inputs()] == ["input_ids", "attention_mask", "token_type_ids"]
    reference = cross_encoder(bert)
    inputs = reference.tokenizer(*zip(*PAIRS, strict=True), padding=True, truncation=True, return_tensors="np")
    scores = session.run(["scores"], {name: inputs[name].astype(np.int64) for name in inputs})[0]
    expected = reference.predict(PAIRS, activation_fn=nn.Identity())
    np.testing.assert_allclose(scores[:, 0], expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("traced")
def test_nan_in_a_batch_alone_is_refused(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(run: Any, pairs: Any, batches: Any, *more: Any) -> Any:
        scores = in_batches(run, pairs, batches, *more)
        if len(batches) < len(scores):
            scores[-1] = np.nan
        return scores

    monkeypatch.setattr(parity, "in_batches", spoil)
    with pytest.raises(ParityError):
        export(bert, tmp_path / "bert.int8.onnx", ExportOptions(int8=True, min_cosine=0.9))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("traced")
def test_int8(bert: Path, tmp_path: Path) -> None:
    target = tmp_path / "bert.int8.onnx"
    # Rounding a few random weights says nothing about a trained model.
    manifest = export(bert, target, ExportOptions(int8=True, min_cosine=0.9))
    assert (manifest.kind, manifest.precision) == ("reranker", "int8")
    assert 0.9 <= manifest.parity["correlation"] < 1
    assert manifest.parity["batch_max_abs"] == 0
    graph = onnx.load(target)
    assert nodes(graph, "MatMulIntegerToFloat")
    assert not nodes(graph, "MatMul")
    with Reranker(target, on_truncate="ignore") as reranker:
        raw = [model.predict(PAIRS, activation_fn=nn.Identity()) for model in (reranker, cross_encoder(bert))]
        assert 0.95 < np.corrcoef(raw)[0, 1] < 1


def test_portable_graphs_and_models_without_token_types(tmp_path: Path) -> None:
    folder = write_cross_encoder(tmp_path / "model", "roberta", labels=3, layout="old")
    manifest = export(folder, target := tmp_path / "model.onnx", ExportOptions(portable=True))
    graph = onnx.load(target)
    assert [value.name for value in graph.graph.input] == ["input_ids", "attention_mask"]
    assert {node.domain for node in graph.graph.node} == {""}
    assert manifest == open_artifact(target).manifest
    assert manifest.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize("what", ["weights", "token types"])
def test_a_wrong_graph_is_not_written(
    bert: Path, fused: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    model = ir.from_proto(onnx.load_from_string(fused))
    name = {"weights": "classifier.bias", "token types": "token_type_embeddings.weight"}[what]
    (value,) = [value for key, value in model.graph.initializers.items() if key.endswith(name)]
    assert value.const_value is not None
    array = value.const_value.numpy()
    value.const_value = ir.tensor(
        array + np.float32(0.01) if what == "weights" else array[::-1].copy(), name=value.name
    )
    monkeypatch.setattr(CrossEncoder, "trace", lambda *_, **options: model)
    with pytest.raises(ParityError, match=r"max-abs .*; nothing was written. Worst pairs:\n"):
        export(bert, tmp_path / "x.onnx")
    assert list(tmp_path.iterdir()) == []


def test_probe_pairs_have_every_length(bert: Path) -> None:
    tokenizer = load_pair_reference(read_cross_encoder(bert)).tokenizer

    def count(pairs: Any) -> list[int]:
        return [len(ids) for ids in tokenizer(*map(list, zip(*pairs, strict=True)))["input_ids"]]

    lengths = count(probe_pairs(count, MAX_LENGTH))
    assert set(range(min(count([("Why is the sky blue?", "a")])), MAX_LENGTH + 1)) <= set(lengths)
    assert max(lengths) > 2 * MAX_LENGTH


def test_weights_in_half_precision_are_widened(copy: Path) -> None:
    """The reference computes in FP32, whatever the weights are stored in."""
    weights = {name: value.half() for name, value in load_file(copy / "model.safetensors").items()}
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    edit_json(copy / "config.json", dtype="float16")
    reference = load_pair_reference(read_cross_encoder(copy))
    assert {parameter.dtype for parameter in reference.parameters()} == {torch.float32}
