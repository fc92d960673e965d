"""8-bit weights and activations for CPUs, one scale per token and one per weight column.

Every `x @ W` of the encoder becomes

    z = x * smooth                        [tokens, in]   outlying channels tamed, their size moved into W
    scale = max |z| / 127                 [tokens, 1]    per token: a vector does not depend on its batch
    y = (u8(z / scale) @ s8(W)) * scale   [tokens, out]  integers inside, column scales applied by the operator

Products that share their input (query, key and value) share its quantization. `smooth` balances the largest
activation of each channel with the largest weight that meets it (SmoothQuant, exponent 0.5).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes.common import RemoveUnusedNodesPass

from sbert_infer.export.constants import add_constant

# CPUs without VNNI add two u8 x s8 products in 16 bits: 2 * 255 * 63 = 32130 fits, 64 would saturate.
WEIGHT_MAX = 63
ACTIVATION_MAX = 127
ZERO_POINT = 128  # activations are symmetric, but the u8 x s8 product is the one every CPU has

Array = npt.NDArray[np.float32]
Batch = Mapping[str, npt.NDArray[np.int64]]


def quantize(model: ir.Model, calibration: Iterable[Batch]) -> ir.Model:
    """Replace the encoder's matrix products in `model`, in place, by 8-bit ones. Returns `model`."""
    groups = _products_by_input(model)
    largest = _largest_activations(model, list(groups), calibration)
    for value, products in groups.items():
        _quantize_group(model.graph, value, products, largest[value.name or ""])
    model.opset_imports["com.microsoft"] = 1
    RemoveUnusedNodesPass()(model)  # with them the FP32 weights
    return model


def _products_by_input(model: ir.Model) -> dict[ir.Value, list[ir.Node]]:
    """The products `[batch, length, in] @ constant [in, out]`, by their left side. Those on pooled rows stay FP32."""
    groups: dict[ir.Value, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        left = node.inputs[0] if node.op_type == "MatMul" and _weight(node) is not None else None
        if left is not None and left.shape is not None and len(left.shape) == 3:
            groups[left].append(node)
    return groups


def _weight(node: ir.Node) -> Array | None:
    right = node.inputs[1]
    tensor = None if right is None else right.const_value
    return tensor.numpy() if tensor is not None and len(tensor.shape) == 2 else None


def _largest_activations(model: ir.Model, values: list[ir.Value], calibration: Iterable[Batch]) -> dict[str, Array]:
    """The largest magnitude of each channel, over the real tokens of all calibration batches."""
    names = [value.name or "" for value in values]
    probe = ir.to_proto(model)
    known = {output.name for output in probe.graph.output}
    for name in names:
        if name not in known:
            probe.graph.output.add().name = name
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # keeps the inner values
    session = onnxruntime.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
    largest = {name: np.zeros(1, np.float32) for name in names}
    for batch in calibration:
        real = batch["attention_mask"].astype(bool)  # [batch, length]
        for name, value in zip(names, session.run(names, dict(batch)), strict=True):
            largest[name] = np.maximum(largest[name], np.abs(value[real]).max(axis=0))
    return largest


def _quantize_group(graph: ir.Graph, value: ir.Value, products: list[ir.Node], largest: Array) -> None:
    weights = [w for node in products if (w := _weight(node)) is not None]
    smooth = _smoothing(largest, weights)
    tape = ir.tape.Tape()

    def constant(name: str, array: npt.ArrayLike) -> ir.Value:
        return add_constant(graph, f"{value.name}.int8.{name}", array)

    z = tape.op("Mul", [value, constant("smooth", smooth)])
    rows = tape.op("Reshape", [z, constant("rows", np.array([-1, len(smooth)]))])  # [tokens, in]
    top = tape.op("ReduceMax", [tape.op("Abs", [rows]), constant("last_axis", np.array([1]))], {"keepdims": 0})
    # The floor keeps a token of zeros from dividing by zero.
    floor = constant("floor", np.float32(1e-10))
    scale = tape.op("Max", [tape.op("Mul", [top, constant("step", np.float32(1 / ACTIVATION_MAX))]), floor])
    zeros = tape.op(
        "Expand", [constant("zero_point", np.array([ZERO_POINT], np.uint8)), tape.op("Shape", [scale])]
    )  # [tokens]
    quantized = tape.op("QuantizeLinear", [rows, scale, zeros], {"axis": 0})
    column = tape.op("Unsqueeze", [scale, constant("column", np.array([1]))])  # [tokens, 1]
    shape = tape.op("Shape", [value], {"start": 0, "end": 2})

    for index, (node, weight) in enumerate(zip(products, weights, strict=True)):
        integers, steps = _quantize_weight(weight / smooth[:, None])
        inputs = [
            quantized,
            constant(f"weight{index}", integers),
            constant("one", np.float32(1)),
            constant(f"steps{index}", steps),
            constant("zero", np.uint8(ZERO_POINT)),
        ]
        product = tape.op("MatMulIntegerToFloat", inputs, domain="com.microsoft")
        scaled = tape.op("Mul", [product, column])
        target = tape.op("Concat", [shape, constant(f"width{index}", np.array([weight.shape[1]]))], {"axis": 0})
        result = tape.op("Reshape", [scaled, target])
        result.shape, result.type = node.outputs[0].shape, node.outputs[0].type
        ir.convenience.replace_all_uses_with(node.outputs[0], result)
    graph.insert_before(products[0], tape.nodes)
    graph.remove(products, safe=True)


def _smoothing(largest: Array, weights: list[Array]) -> Array:
    weight_max = np.max([np.abs(w).max(axis=1) for w in weights], axis=0)  # [in]
    smooth = np.sqrt(np.maximum(weight_max, 1e-5) / np.maximum(largest, 1e-5))
    balanced: Array = (smooth / np.exp(np.log(smooth).mean())).astype(np.float32)
    return balanced


def _quantize_weight(weight: Array) -> tuple[npt.NDArray[np.int8], Array]:
    """[in, out] -> integers and one step per column."""
    steps = np.maximum(np.abs(weight).max(axis=0), 1e-10) / WEIGHT_MAX
    return np.rint(weight / steps).astype(np.int8), steps.astype(np.float32)
