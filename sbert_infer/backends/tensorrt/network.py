"""The network that TensorRT reads from an ONNX model: which output is kept, and what is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbert_infer.backends.tensorrt.tensors import INPUTS, POSITIONS, SPANS
from sbert_infer.backends.tensorrt.versions import TensorRT
from sbert_infer.errors import EngineError

_TYPES = {"fp16": "HALF", "bf16": "BF16"}


def keep_output(network: Any, name: str) -> None:
    """Leave `name` the network's only output.

    Inputs that nothing needs any more stay inputs of the TensorRT engine: it must be given their
    shapes and addresses, and does not read them.
    """
    outputs = {tensor.name: tensor for tensor in map(network.get_output, range(network.num_outputs))}
    if name not in outputs:
        raise EngineError(f"the model has no output {name}, it has {', '.join(sorted(outputs))}")
    for other in set(outputs) - {name}:
        network.unmark_output(outputs[other])


def check_inputs(network: Any) -> None:
    """Raise unless the network's inputs are those of packed rows."""
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    names = {tensor.name for tensor in inputs}
    if missing := set(INPUTS) - {POSITIONS} - names:
        raise EngineError(f"the model has no input {', '.join(sorted(missing))}")
    if foreign := names - set(INPUTS):
        raise EngineError(f"the model has an input that is never set: {', '.join(sorted(foreign))}")
    if shapes := [tensor.name for tensor in inputs if tensor.is_shape_tensor]:
        raise EngineError(
            f"the values of {', '.join(shapes)} determine shapes, which a TensorRT engine with fixed shapes can't have"
        )


def check_products(trt: TensorRT, network: Any, precision: str) -> None:
    """Raise, naming the layers, unless all matrix products of tokens are in `precision`.

    Pooling, and layers after it, may be FP32: they are what depends on `starts` and `ends`. Outer
    products (of one column and one row, as in rotary position tables) are not checked, because
    they sum nothing.
    """
    if precision not in _TYPES:
        raise ValueError(f"precision must be one of {', '.join(_TYPES)}, got {precision!r}")
    wanted = getattr(trt.module.DataType, _TYPES[precision])
    products = _products(trt, network)
    wrong = [layer for layer in products if layer.get_output(0).dtype != wanted and 1 not in _inner(layer)]
    if wrong:
        names = ", ".join(f"{layer.name} ({layer.get_output(0).dtype.name})" for layer in wrong)
        raise EngineError(f"{len(wrong)} of {len(products)} matrix products are not in {precision.upper()}: {names}")


def _products(trt: TensorRT, network: Any) -> list[Any]:
    """Return the matrix products that do not depend on which tokens are pooled."""
    pooled, products = set(SPANS), []
    for layer in (network.get_layer(index) for index in range(network.num_layers)):  # inputs before their users
        inputs = [layer.get_input(index) for index in range(layer.num_inputs)]
        if any(tensor is not None and tensor.name in pooled for tensor in inputs):
            pooled.update(layer.get_output(index).name for index in range(layer.num_outputs))
        elif layer.type == trt.module.LayerType.MATRIX_MULTIPLY:
            products.append(layer)
    return products


def _inner(layer: Any) -> tuple[int, ...]:
    """Return the dimension summed over, from the first operand's shape; empty for a vector."""
    shape = tuple(layer.get_input(0).shape)
    return shape[-1:] if len(shape) > 1 else ()


def parse_problem(errors: Sequence[Any]) -> str:
    """Return what the parser's errors say about the model, in one line."""
    nodes = [f"{error.node_operator()} (node {error.node_name() or 'without a name'})" for error in errors]
    operators = list(dict.fromkeys(node for node, error in zip(nodes, errors, strict=True) if error.node_operator()))
    return f"does not take the operators {', '.join(operators)}" if operators else "can't read the model"
