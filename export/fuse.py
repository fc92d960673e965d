"""Graph passes for onnxruntime: what the exporter leaves between the fused operators is taken out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.rewriter.ort_fusions import optimize_for_ort

from sbert_infer.export.constants import add_constant

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class FusedNodes:
    """How many fused operators a graph holds, and how many layers the model has, with a GELU and in all."""

    layers: int
    gelu_layers: int
    attention: int
    skip_layer_norm: int
    gelu: int


def fuse(model: ir.Model) -> ir.Model:
    """Fuse layer norms and activations, then tie the attention nodes directly to their neighbours."""
    fused: ir.Model = optimize_for_ort(model)[0]
    for node in _nodes(fused, "MultiHeadAttention"):
        _connect_attention(fused.graph, node)
    for node in _nodes(fused, "SkipLayerNormalization"):
        _drop_unused_outputs(node)
    RemoveUnusedNodesPass()(fused)
    return fused


def count_fused(model: ir.Model, layers: int, gelu_layers: int) -> FusedNodes:
    """Count the fused operators in `model`."""
    count = Counter(node.op_type for node in model.graph if node.domain == MICROSOFT)
    gelus = ("BiasGelu", "Gelu", "FastGelu", "QuickGelu")
    return FusedNodes(
        layers=layers,
        gelu_layers=gelu_layers,
        attention=count["MultiHeadAttention"],
        skip_layer_norm=count["SkipLayerNormalization"],
        gelu=sum(count[name] for name in gelus),
    )


def _nodes(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type and node.domain == MICROSOFT]


def _connect_attention(graph: ir.Graph, node: ir.Node) -> None:
    """Skip the reshapes to heads and back, which cancel out, and give the three biases to the operator itself."""
    sources = [_behind_reshapes(value) for value in node.inputs[:3]]
    for index, source in enumerate(sources):
        node.replace_input_with(index, source)
    output = node.outputs[0]
    for user, _ in list(output.uses()):
        _bypass_reshape_pair(user, output)
    projections = [_projection(source) for source in sources]
    if all(projections) and node.inputs[3] is None:
        _absorb_biases(graph, node, [p for p in projections if p])


def _behind_reshapes(value: ir.Value | None) -> ir.Value | None:
    while value is not None and (producer := value.producer()) is not None and producer.op_type == "Reshape":
        value = producer.inputs[0]
    return value


def _bypass_reshape_pair(node: ir.Node, source: ir.Value) -> None:
    """`source` -> [.., heads, head_dim] -> [.., hidden]: the second reshape gives `source` back."""
    if node.op_type != "Reshape":
        return
    for second, _ in list(node.outputs[0].uses()):
        if second.op_type == "Reshape":
            for user, index in list(second.outputs[0].uses()):
                user.replace_input_with(index, source)


def _projection(value: ir.Value | None) -> tuple[ir.Value, np.ndarray] | None:
    """Split `product + constant` into the product and the constant [hidden]."""
    producer = None if value is None else value.producer()
    if producer is None or producer.op_type != "Add":
        return None
    left, right = producer.inputs
    if left is None or right is None or right.const_value is None:
        return None
    return left, right.const_value.numpy()


def _absorb_biases(graph: ir.Graph, node: ir.Node, projections: list[tuple[ir.Value, np.ndarray]]) -> None:
    for index, (product, _) in enumerate(projections):
        node.replace_input_with(index, product)
    packed = np.concatenate([bias for _, bias in projections])
    node.replace_input_with(3, add_constant(graph, f"{node.outputs[0].name}.qkv_bias", packed))


def _drop_unused_outputs(node: ir.Node) -> None:
    """An output that is named is computed and written, used or not."""
    keep = max(i for i, value in enumerate(node.outputs) if value.uses() or value.is_graph_output())
    node.resize_outputs(keep + 1)
