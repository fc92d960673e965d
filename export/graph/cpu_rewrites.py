"""Graph passes for FP32 on CPUs, after fusion: exact rewrites that would only cost time elsewhere.

8-bit graphs do not use them. Their products are no `Gemm`, and unmasked attention differs in the
last bit, which rounding turns into a whole step: a text's vector would depend on its batch.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from sbert_infer.export.graph.constants import add_constant

_MASK = 4  # MultiHeadAttention's inputs: query, key, value, bias, key_padding_mask, attention_bias


def tune(model: ir.Model) -> ir.Model:
    """Rewrite a fused FP32 `model` in place and return it; on MiniLM this saves 5 % of the time."""
    for node in list(model.graph):
        if node.op_type == "BiasGelu":
            _bias_into_product(model.graph, node)
    _unmask_attention(model.graph)
    RemoveUnusedNodesPass()(model)
    return model


def _bias_into_product(graph: ir.Graph, node: ir.Node) -> None:
    """Turn `BiasGelu(MatMul(x, W), bias)` into `Gelu(Gemm(x, W, bias))`, whose bias is free."""
    product, bias = node.inputs
    matmul = None if product is None else product.producer()
    if matmul is None or matmul.op_type != "MatMul" or len(product.uses()) > 1:  # type: ignore[union-attr]
        return
    x, weight = matmul.inputs
    if weight is None or weight.const_value is None or x is None or x.shape is None or len(x.shape) != 3:
        return
    width_in, width_out = weight.const_value.shape
    tape = ir.tape.Tape()
    rows = tape.op("Reshape", [x, add_constant(graph, f"rows.{width_in}", np.array([-1, width_in], np.int64))])
    rows = tape.op("Gemm", [rows, weight, bias])  # [batch * length, out]
    sizes = tape.op("Shape", [x], {"start": 0, "end": 2})
    width = add_constant(graph, f"width.{width_out}", np.array([width_out], np.int64))
    shaped = tape.op("Reshape", [rows, tape.op("Concat", [sizes, width], {"axis": 0})])
    shaped.shape, shaped.type = node.outputs[0].shape, node.outputs[0].type
    activated = tape.op("Gelu", [shaped], domain="com.microsoft")
    ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [activated])


def _unmask_attention(graph: ir.Graph) -> None:
    """Attend without a mask if no text of a batch is padded, which is common after sorting.

    onnxruntime then neither creates nor adds a mask of [batch, length, length], and uses a kernel
    that never stores scores of that size, so that texts of thousands of tokens fit into memory.
    """
    nodes = [node for node in graph if node.op_type == "MultiHeadAttention" and _is_masked(node)]
    if not nodes:
        return
    (mask,) = [value for value in graph.inputs if value.name == "attention_mask"]
    tape = ir.tape.Tape()
    smallest = tape.op("ReduceMin", [mask], {"keepdims": 0})
    unpadded = tape.op("Cast", [smallest], {"to": ir.DataType.BOOL})
    graph.insert_before(graph[0], tape.nodes)
    for node in nodes:
        either = ir.tape.Tape()
        branches = {"then_branch": _branch(node, masked=False), "else_branch": _branch(node, masked=True)}
        result = either.op("If", [unpadded], branches)
        ir.convenience.replace_nodes_and_values(graph, node, [node], either.nodes, node.outputs, [result])


def _is_masked(node: ir.Node) -> bool:
    """Whether the padding mask is all that changes its scores."""
    optional = [*node.inputs[_MASK:], None, None][:2]
    return optional[0] is not None and optional[1] is None


def _branch(node: ir.Node, *, masked: bool) -> ir.Graph:
    inputs = node.inputs[: _MASK + 1] if masked else node.inputs[:_MASK]
    copy = ir.node("MultiHeadAttention", inputs, node.attributes, domain=node.domain)
    source, output = node.outputs[0], copy.outputs[0]
    output.name = f"{source.name}.{'masked' if masked else 'unmasked'}"
    output.shape, output.type = source.shape, source.type
    return ir.Graph([], [output], nodes=[copy], name=output.name)
