"""Products that 8 bits would spoil stay in FP32, as few as possible, and are named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from sbert_infer import Engine
from sbert_infer.artifact import open_artifact
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.cli import main
from sbert_infer.export.exporter import export
from sbert_infer.export.options import ExportOptions
from sbert_infer.export.precision.int8 import quantize, round_products
from sbert_infer.export.precision.keep_back import keep_back, most_kept
from sbert_infer.export.reference.encoder import load_reference
from tests.models.checkpoints import LAYERS, TEXTS
from tests.models.graphs import Array, constants, cosine, nodes, run

MakeCheckpoint = Callable[..., Path]

SPOILT = "encoder.layer.1.output.dense"  # a product that 8 bits can't hold
UNUSED = 3  # a channel of its input, which is always zero
DEPTH, WIDTH = 6, 16


# -------------------------------------------------------------------------------------------------
# the choice


def chain(spoilt: dict[int, float]) -> onnx.ModelProto:
    """Products one after the other, with a residual; those `spoilt` have a far too large weight.

    It meets a channel that is zero, so that it matters to the rounding alone; what comes out of a
    GELU is not smoothed.
    """
    random = np.random.default_rng(0)
    layer = "g{0} = com.microsoft.Gelu(h{0}) p{0} = MatMul(g{0}, w{0}) h{1} = Add(h{0}, p{0})"
    body = "\n".join(layer.format(index, index + 1) for index in range(DEPTH))
    values = ", ".join(f"float[batch, length, {WIDTH}] g{i}" for i in range(DEPTH))
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        graph (float[batch, length, {WIDTH}] h0, int64[batch, length] attention_mask)
            => (float[batch, length, {WIDTH}] sentence_embedding)
        <{values}> {{
        {body}
        sentence_embedding = Identity(h{DEPTH})
        }}"""
    )
    for index in range(DEPTH):
        weight = random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH
        weight[:, UNUSED] = 0
        weight[UNUSED] = spoilt.get(index, 0)
        weight[UNUSED, UNUSED] = 0
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"w{index}"))
    return model


def batch_of_chain() -> dict[str, Array]:
    x = np.random.default_rng(1).normal(size=(2, 5, WIDTH)).astype(np.float32)
    x[..., UNUSED] = 0
    return {"h0": x, "attention_mask": np.ones((2, 5), np.int64)}


def chosen(spoilt: dict[int, float], excess: float, kept: tuple[int, ...] = ()) -> tuple[list[int], list[float]]:
    """The groups to keep, and the error without and with them."""
    model, batch = chain(spoilt), batch_of_chain()
    rounded = round_products(ir.from_proto(model), [batch])
    assert rounded.groups == tuple((f"w{index}",) for index in range(DEPTH))
    done: list[int] = []
    groups = keep_back(ir.from_proto(model), rounded, [batch], kept, excess, most_kept(rounded), done.append)
    assert sum(done) == DEPTH
    errors = []
    for keep in (kept, groups):
        graph = ir.to_proto(quantize(ir.from_proto(model), rounded, keep))
        assert len(nodes(graph, "MatMul")) == len(keep)
        errors.append(float(np.square(run(graph, batch) - run(model, batch)).sum()))
    return groups, errors


def test_the_spoilt_one_is_kept() -> None:
    groups, errors = chosen({4: 100.0}, excess=20)
    assert groups == [4]
    assert errors[1] < errors[0] / 20


def test_the_worst_come_first_and_no_more_than_needed() -> None:
    assert chosen({1: 300.0, 4: 30.0}, excess=1.5)[0] == [1]
    groups, errors = chosen({1: 300.0, 4: 30.0}, excess=100)
    assert groups == [1, 4]
    assert errors[1] < errors[0] / 100


def test_those_already_kept_stay() -> None:
    assert chosen({1: 300.0, 4: 30.0}, excess=3, kept=(1,))[0] == [1, 4]


def test_half_of_them_at_most() -> None:
    groups, errors = chosen({4: 100.0}, excess=1e9)
    assert groups[0] == 4
    assert len(groups) == len(set(groups)) == DEPTH // 2
    assert 0 < errors[1] < errors[0]


# -------------------------------------------------------------------------------------------------
# an export


@pytest.fixture(scope="module")
def spoilt_checkpoint(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with huge weights for a unit that never fires."""
    folder = tmp_path_factory.mktemp("spoilt") / "spoilt"
    shutil.copytree(make_checkpoint(), folder)
    (file,) = folder.rglob("model.safetensors")
    weights = load_file(file)
    (name,) = [name for name in weights if name.endswith(f"{SPOILT}.weight")]
    weights[name][:, UNUSED] = 50.0
    weights[name.replace("output.dense.weight", "intermediate.dense.bias")][UNUSED] = -50.0
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def kept_back(spoilt_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The artifact, and what was printed."""
    target = tmp_path_factory.mktemp("kept") / "model.int8.onnx"
    arguments = ["--int8", "--max-length", "12", "--min-cosine", "0.97", "-o", str(target)]
    result = CliRunner().invoke(main, [str(spoilt_checkpoint), *arguments])
    assert result.exit_code == 0, result.output
    return target, result.stdout, result.stderr


def test_the_export_keeps_it_in_fp32(kept_back: tuple[Path, str, str], spoilt_checkpoint: Path) -> None:
    model = onnx.load(kept_back[0])
    (product,) = nodes(model, "MatMul")
    weight = constants(model)[product.input[1]]
    np.testing.assert_array_equal(weight[UNUSED], 50.0)
    assert len(nodes(model, "MatMulIntegerToFloat")) == 6 * LAYERS - 1
    reference = load_reference(read_checkpoint(spoilt_checkpoint, max_length=12))
    with Engine(kept_back[0], on_truncate="ignore") as engine:
        assert 0.97 <= cosine(engine.encode(TEXTS), reference.encode(TEXTS)).min() < 0.99999


def test_the_export_says_so(kept_back: tuple[Path, str, str]) -> None:
    target, summary, steps = kept_back
    (name,) = open_artifact(target).manifest.parity["kept_fp32"]
    assert name.endswith(f"{SPOILT}.weight")
    said = f"1 weights in FP32, which cost too much in 8 bits: {name}"
    assert said in summary
    assert said in CliRunner().invoke(main, ["--inspect", str(target)]).stdout
    assert [line.split()[0] for line in steps.splitlines()][-4:] == ["quantize", "keep", "verify", "save"]


@pytest.mark.parametrize("asked", [None, 0.9])
def test_what_can_not_be_reached_is_given_a_quarter_of_them_unless_less_is_asked_for(
    asked: float | None, make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbert_infer.export.exporter.AIM", 1 - 1e-12)
    options = ExportOptions(int8=True, max_length=12, min_cosine=asked)
    parity = export(make_checkpoint(), tmp_path / "model.onnx", options).parity
    groups = 4 * LAYERS  # query, key and value are one
    products = nodes(onnx.load(tmp_path / "model.onnx"), "MatMulIntegerToFloat")
    if asked is None:
        assert 6 * LAYERS - 3 * groups // 4 <= len(products) <= 6 * LAYERS - groups // 4
        assert 0.985 == parity["threshold"] <= parity["min_cosine"] < 1 - 1e-9
        assert parity["kept_fp32"]
    else:
        assert len(products) == 6 * LAYERS
        assert parity["threshold"] == 0.9
        assert "kept_fp32" not in parity
