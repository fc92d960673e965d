"""8-bit weights and activations for CPUs, one scale per token and one per weight column.

Every `x @ W` of the encoder becomes

    z = x * smooth                        [tokens, in]   outlying channels scaled down, W scaled up
    scale = max |z| / 127                 [tokens, 1]    per token: independent of the batch
    y = (u8(z / scale) @ s8(W)) * scale   [tokens, out]  in integers, with a scale for each column

Products that share their input (query, key and value) share its quantization, and layers that share
a weight keep sharing it. `smooth` balances the largest activation of each channel with the largest
weight it is multiplied with (SmoothQuant, exponent 0.5). The output of a GELU is nearly one-sided:
it needs neither smoothing nor absolute values, and almost the whole integer range is used for its
positive side. Weights are rounded by `gptq.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from sbert_infer.export.graph.constants import add_constant
from sbert_infer.export.options import Progress, no_progress
from sbert_infer.export.precision.gptq import correction, round_rows
from sbert_infer.export.precision.inner_session import InnerSession

# CPUs without VNNI add two u8 x s8 products in 16 bits: 2 * 255 * 63 = 32130 fits, 64 saturates.
WEIGHT_MAX = 63
ACTIVATION_MAX = 127
ZERO_POINT = 128  # activations are symmetric, but the u8 x s8 product is the one every CPU has
GELU_MIN = -0.17001  # neither GELU, exact or approximate, goes below
ONE_SIDED_ZERO_POINT = 32

KEPT = "kept"  # input of a graph with a choice

_ROUNDING_COST = 4  # times that of a product of the same size, measured on a base-size model
_CALIBRATION_ITEMS = 512  # more change the largest activations little
_CALIBRATION_BATCH = 16
_CALIBRATION_CHARACTERS = 2048  # of a batch: the inputs of all products are in memory at once

Array = npt.NDArray[np.float32]
Batch = Mapping[str, npt.NDArray[np.int64]]
Item = TypeVar("Item")


def calibration_samples(items: Sequence[Item], size: Callable[[Any], int] = len) -> Iterator[list[Item]]:
    """Some of the texts or pairs, evenly spaced, in batches of similar `size`."""
    batch: list[Item] = []
    for item in sorted(items[:: max(1, len(items) // _CALIBRATION_ITEMS)], key=size):
        if batch and (len(batch) == _CALIBRATION_BATCH or size(item) * (len(batch) + 1) > _CALIBRATION_CHARACTERS):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


@dataclass(frozen=True)
class Rounded:
    """The 8-bit weights of a model's products, for graphs that have all of them or only some.

    Products with the same input share its quantization, and products with the same weight share
    that, so a group of them is rounded together, and kept in FP32 together.
    """

    groups: tuple[tuple[str, ...], ...]  # names of the weights in each
    smooth: Mapping[str, Array]  # by the products' input
    weights: Mapping[str, tuple[npt.NDArray[np.int8], Array]]  # by weight: integers [in, out], step of each column


def round_products(model: ir.Model, calibration: Sequence[Batch], progress: Progress = no_progress) -> Rounded:
    """Round the weights of the encoder's matrix products; `model` stays as it is.

    `progress` takes the work done, of `rounding_work` in all.
    """
    products = _products_by_input(model)
    seen = _activations(model, products, calibration, progress)
    groups: list[tuple[str, ...]] = []
    smooth: dict[str, Array] = {}
    rounded: dict[str, tuple[npt.NDArray[np.int8], Array]] = {}
    for values in _clusters(products):
        weights = {_weight_name(node): _weight(node) for value in values for node in products[value]}
        some = [seen.pop(value) for value in values]  # the moments of wide layers are larger than their weights
        top = np.max([each.largest for each in some], axis=0)
        scale = np.ones_like(top) if all(map(_after_gelu, values)) else _smoothing(top, list(weights.values()))
        spread = correction(sum(each.moments for each in some) * np.outer(scale, scale))
        groups.append(tuple(weights))
        smooth |= {_name(value): scale for value in values}
        for name, weight in weights.items():
            rounded[name] = _round(weight / scale[:, None], spread)
            progress(_cost_of_rounding(weight))
    return Rounded(tuple(groups), smooth, rounded)


def rounding_work(model: ir.Model, calibration: Sequence[Batch]) -> int:
    """How much `round_products` has to do, in multiplications of the calibration's products."""
    products = _products_by_input(model)
    weights = {_weight_name(node): _weight(node) for nodes in products.values() for node in nodes}
    rounding = sum(map(_cost_of_rounding, weights.values()))
    return rounding + _cost_of_a_token(products) * sum(batch["attention_mask"].size for batch in calibration)


def quantize(model: ir.Model, rounded: Rounded, kept: Collection[int] = ()) -> ir.Model:
    """Replace the products of all groups but those `kept` by 8-bit ones, in place."""
    fp32 = {name for index in kept for name in rounded.groups[index]}
    for value, products in _products_by_input(model).items():
        if _weight_name(products[0]) not in fp32:
            _quantize_group(model.graph, value, products, rounded)
    model.opset_imports["com.microsoft"] = 1
    RemoveUnusedNodesPass()(model)  # and with them the FP32 weights
    return model


def quantize_by_choice(model: ir.Model, rounded: Rounded) -> ir.Model:
    """Give `model` an input `kept` [groups], which says of each whether it is computed in FP32."""
    kept = ir.Value(name=KEPT, shape=ir.Shape([len(rounded.groups)]), type=ir.TensorType(ir.DataType.BOOL))
    model.graph.inputs.append(kept)
    group_of = {name: index for index, names in enumerate(rounded.groups) for name in names}
    for value, products in _products_by_input(model).items():
        index = group_of[_weight_name(products[0])]
        where = add_constant(model.graph, f"{KEPT}.{index}", np.array(index))
        _quantize_group(model.graph, value, products, rounded, choice=(kept, where))
    model.opset_imports["com.microsoft"] = 1
    return model


def _products_by_input(model: ir.Model) -> dict[ir.Value, list[ir.Node]]:
    """The products `[batch, length, in] @ constant`, by their left side; others stay FP32."""
    groups: dict[ir.Value, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        left, right = node.inputs if node.op_type == "MatMul" else (None, None)
        constant = None if right is None else right.const_value
        rank = 0 if left is None or left.shape is None else len(left.shape)
        if left is not None and rank == 3 and constant is not None and len(constant.shape) == 2:
            groups[left].append(node)
    return groups


def _clusters(groups: Mapping[ir.Value, list[ir.Node]]) -> list[list[ir.Value]]:
    """Groups of inputs whose products share a weight (ALBERT): one smoothing keeps it shared."""
    clusters: dict[ir.Value | None, list[ir.Value]] = {}  # by weight
    for value, products in groups.items():
        weights = [node.inputs[1] for node in products]
        known = {id(clusters[weight]): clusters[weight] for weight in weights if weight in clusters}
        joined = [*(member for cluster in known.values() for member in cluster), value]
        clusters |= dict.fromkeys([*weights, *(w for w, cluster in clusters.items() if id(cluster) in known)], joined)
    return list({id(cluster): cluster for cluster in clusters.values()}.values())


def _weight(node: ir.Node) -> Array:
    right = node.inputs[1]
    assert right is not None and right.const_value is not None  # noqa: S101, PT018  # as _products_by_input saw to
    return right.const_value.numpy()


def _weight_name(node: ir.Node) -> str:
    return _name(node.inputs[1])


def _name(value: ir.Value | None) -> str:
    return (value.name if value is not None else None) or ""


def _cost_of_a_token(products: Mapping[ir.Value, list[ir.Node]]) -> int:
    """It is multiplied with the weights, and with itself for the moments."""
    sizes = [_weight(node).size for nodes in products.values() for node in nodes]
    return sum(sizes) + sum(len(_weight(nodes[0])) ** 2 for nodes in products.values())


def _cost_of_rounding(weight: Array) -> int:
    """Row by row, which is slower than a product."""
    return _ROUNDING_COST * len(weight) * weight.size


@dataclass
class _Activations:
    """Statistics of one input over all real tokens of the calibration texts."""

    largest: Array  # magnitude of each channel, [in]
    moments: Array  # sum of x.T @ x, [in, in]

    def add(self, rows: Array) -> None:
        self.largest = np.maximum(self.largest, np.abs(rows).max(axis=0, initial=0))
        self.moments += rows.T @ rows


def _activations(
    model: ir.Model, products: Mapping[ir.Value, list[ir.Node]], calibration: Sequence[Batch], progress: Progress
) -> dict[ir.Value, _Activations]:
    names = [_name(value) for value in products]
    session = InnerSession(model, names)
    seen = {}
    for value, nodes in products.items():
        width = len(_weight(nodes[0]))
        seen[value] = _Activations(np.zeros(width, np.float32), np.zeros((width, width), np.float32))
    cost = _cost_of_a_token(products)
    for batch in calibration:
        real = batch["attention_mask"].astype(bool)  # [batch, length]
        for value, output in zip(products, session.run(names, batch), strict=True):
            seen[value].add(output[real])
        progress(real.size * cost)
    return seen


def _quantize_group(
    graph: ir.Graph,
    value: ir.Value,
    products: list[ir.Node],
    rounded: Rounded,
    choice: tuple[ir.Value, ir.Value] | None = None,
) -> None:
    """Replace `products`, which all multiply `value`, by 8-bit ones.

    With a `choice`, a vector of booleans and a place in it, they stay where that is true.
    """
    tape, smooth = ir.tape.Tape(), rounded.smooth[_name(value)]

    def constant(name: str, array: npt.ArrayLike) -> ir.Value:
        return add_constant(graph, f"{value.name}.int8.{name}", array)

    zero_point = ONE_SIDED_ZERO_POINT if _after_gelu(value) else ZERO_POINT
    z = value if np.all(smooth == 1) else tape.op("Mul", [value, constant("smooth", smooth)])
    rows = tape.op("Reshape", [z, constant("rows", np.array([-1, len(smooth)]))])  # [tokens, in]
    scale = _token_scales(tape, constant, rows, _after_gelu(value))  # [tokens]
    zeros = tape.op("Expand", [constant("zeros", np.array([zero_point], np.uint8)), tape.op("Shape", [scale])])
    quantized = tape.op("QuantizeLinear", [rows, scale, zeros], {"axis": 0})
    column = tape.op("Unsqueeze", [scale, constant("column", np.array([1]))])  # [tokens, 1]
    shape = tape.op("Shape", [value], {"start": 0, "end": 2})

    for index, node in enumerate(products):
        name = f"{_weight_name(node)}.int8"
        integers, columns = rounded.weights[_weight_name(node)]
        weight, steps = add_constant(graph, name, integers), add_constant(graph, f"{name}.steps", columns)
        inputs = [quantized, weight, constant("one", np.float32(1)), steps, constant("zero", np.uint8(zero_point))]
        product = tape.op("MatMulIntegerToFloat", inputs, domain="com.microsoft")
        scaled = tape.op("Mul", [product, column])
        target = tape.op("Concat", [shape, constant(f"width{index}", _weight(node).shape[1:])], {"axis": 0})
        result = tape.op("Reshape", [scaled, target])
        if choice is not None:
            result = tape.op("Where", [tape.op("Gather", choice), tape.op("MatMul", node.inputs), result])
        result.shape, result.type = node.outputs[0].shape, node.outputs[0].type
        ir.convenience.replace_all_uses_with(node.outputs[0], result)
    graph.insert_before(products[0], tape.nodes)
    graph.remove(products, safe=True)


def _token_scales(
    tape: ir.tape.Tape, constant: Callable[[str, npt.ArrayLike], ir.Value], rows: ir.Value, one_sided: bool
) -> ir.Value:
    """The size of one integer step in each row: [tokens, in] -> [tokens]."""
    last_axis = constant("last_axis", np.array([1]))
    largest = tape.op("ReduceMax", [rows if one_sided else tape.op("Abs", [rows]), last_axis], {"keepdims": 0})
    steps = 255 - ONE_SIDED_ZERO_POINT if one_sided else ACTIVATION_MAX
    # The floor keeps negative numbers after a GELU in range, and avoids a division by zero.
    floor = -GELU_MIN / ONE_SIDED_ZERO_POINT if one_sided else 1e-10
    scaled = tape.op("Mul", [largest, constant("step", np.float32(1 / steps))])
    return tape.op("Max", [scaled, constant("floor", np.float32(floor))])


def _after_gelu(value: ir.Value) -> bool:
    """Whether `value` is hardly ever negative, so that few integers are needed below zero."""
    producer = value.producer()
    return producer is not None and producer.op_type in ("BiasGelu", "Gelu", "FastGelu")


def _smoothing(largest: Array, weights: list[Array]) -> Array:
    weight_max = np.max([np.abs(w).max(axis=1) for w in weights], axis=0)  # [in]
    smooth = np.sqrt(np.maximum(weight_max, 1e-5) / np.maximum(largest, 1e-5))
    balanced: Array = (smooth / np.exp(np.log(smooth).mean())).astype(np.float32)
    return balanced


def _round(weight: Array, spread: Array) -> tuple[npt.NDArray[np.int8], Array]:
    """Integers [in, out] and the step of each column."""
    steps: Array = np.maximum(np.abs(weight).max(axis=0), 1e-10) / np.float32(WEIGHT_MAX)
    return round_rows(weight, steps, WEIGHT_MAX, spread), steps
