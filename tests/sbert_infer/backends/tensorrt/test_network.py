"""What is checked in the network that the real TensorRT-RTX reads from a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from sbert_infer import EngineError
from sbert_infer.artifact.manifest import SENTENCE, TOKENS
from sbert_infer.backends.tensorrt.network import check_inputs, check_products, keep_output
from sbert_infer.backends.tensorrt.versions import TensorRT, load
from tests.models.tensorrt_models import BF16, small_encoder

pytest.importorskip("tensorrt_rtx")


@pytest.fixture(scope="module")
def rtx() -> TensorRT:
    return load("tensorrt_rtx")


def parsed(rtx: TensorRT, model: bytes) -> Any:
    """Return the network, with the objects that must live as long as it does."""
    log = rtx.log
    builder = rtx.module.Builder(log)
    network = builder.create_network(1 << int(rtx.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    assert rtx.module.OnnxParser(network, log).parse(model)
    return SimpleNamespace(network=network, builder=builder, log=log)


def products(rtx: TensorRT, network: Any) -> list[Any]:
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    return [layer for layer in layers if layer.type == rtx.module.LayerType.MATRIX_MULTIPLY]


@pytest.mark.parametrize(("dtype", "precision", "name"), [(np.float16, "fp16", "HALF"), (BF16, "bf16", "BF16")])
def test_products_of_16_bits(rtx: TensorRT, dtype: Any, precision: str, name: str) -> None:
    there = parsed(rtx, small_encoder(dtype))
    found = products(rtx, there.network)
    assert len(found) == 6  # five of tokens, and pooling
    assert {layer.get_output(0).dtype for layer in found} == {getattr(rtx.module.DataType, name)}
    check_products(rtx, there.network, precision)


@pytest.mark.parametrize(
    ("dtype", "precision", "there"),
    [(np.float32, "fp16", "FLOAT"), (BF16, "fp16", "BF16"), (np.float16, "bf16", "HALF")],
)
def test_products_of_another_type_are_named(rtx: TensorRT, dtype: Any, precision: str, there: str) -> None:
    wrong = rf"^5 of 5 matrix products are not in {precision.upper()}: node_query \({there}\), node_key "
    with pytest.raises(EngineError, match=wrong):
        check_products(rtx, parsed(rtx, small_encoder(dtype)).network, precision)


def test_a_single_product_is_named(rtx: TensorRT) -> None:
    with pytest.raises(EngineError, match=r"^1 of 6 matrix products are not in FP16: node_wide_product \(FLOAT\)$"):
        check_products(rtx, parsed(rtx, small_encoder(wide=True)).network, "fp16")


def test_outer_products_may_be_fp32(rtx: TensorRT) -> None:
    check_products(rtx, parsed(rtx, small_encoder(outer=True)).network, "fp16")


def test_pooling_may_be_fp32(rtx: TensorRT) -> None:
    model = onnx.load_from_string(small_encoder())
    for node in model.graph.node:
        if node.name == "node_members":
            node.attribute[0].i = onnx.TensorProto.FLOAT
        if node.name == "node_total":
            node.input[1] = "tokens32"
    at = next(index for index, node in enumerate(model.graph.node) if node.name == "node_total")
    wide = onnx.helper.make_node("Cast", ["token_embeddings"], ["tokens32"], to=onnx.TensorProto.FLOAT)
    model.graph.node.insert(at, wide)
    network = parsed(rtx, model.SerializeToString())
    assert [layer.get_output(0).dtype.name for layer in products(rtx, network.network)] == ["HALF"] * 5 + ["FLOAT"]
    check_products(rtx, network.network, "fp16")


def test_a_precision_that_is_none(rtx: TensorRT) -> None:
    with pytest.raises(ValueError, match="precision must be one of fp16, bf16, got 'int8'"):
        check_products(rtx, parsed(rtx, small_encoder()).network, "int8")


@pytest.mark.parametrize("name", ["input_ids", "segment_ids", "starts", "ends"])
def test_inputs_that_are_missing(rtx: TensorRT, name: str) -> None:
    with pytest.raises(EngineError, match=f"the model has no input {name}"):
        check_inputs(parsed(rtx, renamed(name)).network)


def test_an_input_that_is_foreign(rtx: TensorRT) -> None:
    with pytest.raises(EngineError, match="the model has an input that is never set: other"):
        check_inputs(parsed(rtx, renamed("position_ids")).network)
    check_inputs(parsed(rtx, small_encoder(positions=False)).network)


def renamed(name: str) -> bytes:
    model = onnx.load_from_string(small_encoder())
    for node in model.graph.node:
        node.input[:] = ["other" if value == name else value for value in node.input]
    next(value for value in model.graph.input if value.name == name).name = "other"
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("name", [SENTENCE, TOKENS])
def test_one_output_is_kept(rtx: TensorRT, name: str) -> None:
    there = parsed(rtx, small_encoder())
    keep_output(there.network, name)
    assert [there.network.get_output(index).name for index in range(there.network.num_outputs)] == [name]
    keep_output(there.network, name)
    with pytest.raises(EngineError, match=f"the model has no output scores, it has {name}"):
        keep_output(there.network, "scores")
