"""Graph passes for onnxruntime's CUDA provider, after fusion: masks that its fused kernels take.

Read in onnxruntime 1.30, contrib_ops/cuda/bert/multihead_attention.cc. In FP16, of its kernels for
`MultiHeadAttention`
- flash attention takes no mask and no bias at all;
- TensorRT's takes the texts' lengths [batch], for heads of 32 or 64, up to sm89;
- cuDNN's takes the texts' lengths as well, from sm90 on;
- memory-efficient attention (cutlass_fmha) runs on all GPUs with heads that are a multiple of 8. It
  takes the lengths with the places where rows start, [3 * batch + 2], and a bias, if the length is
  a multiple of 8, which the runtime pads to.
A mask [batch, length], as in the graph for CPUs, gets none of them: all scores would be written to
memory. So padding becomes lengths and places; one form, and one kernel, for every GPU.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from sbert_infer.export.graph.attention import MASKED
from sbert_infer.export.graph.constants import add_constant

_MASK, _BIAS = 4, 5  # MultiHeadAttention's inputs: query, key, value, bias, key_padding_mask, attention_bias


def tune_for_cuda(model: ir.Model, padding_side: str) -> ir.Model:
    """Rewrite a fused `model` in place and return it."""
    graph = model.graph
    masked = [node for node in graph if node.op_type == "MultiHeadAttention" and _input(node, _MASK) is not None]
    if masked:
        (mask,) = [value for value in graph.inputs if value.name == "attention_mask"]
        if padding_side == "right":
            _mask_by_lengths(graph, mask, masked)
        else:
            _mask_by_bias(graph, mask, masked)
    RemoveUnusedNodesPass()(model)
    return model


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _mask_by_lengths(graph: ir.Graph, mask: ir.Value, nodes: list[ir.Node]) -> None:
    """[tokens of each text; first token of each row and the end; the same again for the keys].

    A text without tokens counts as one: a softmax of nothing would be NaN.
    """
    tape = ir.tape.Tape()
    number = {n: add_constant(graph, f"cuda.{n}", np.array(n, np.int64)) for n in (0, 1)}
    row = add_constant(graph, "cuda.row", np.array([1], np.int64))
    lengths = tape.op("Max", [tape.op("ReduceSum", [mask, row], {"keepdims": 0}), number[1]])
    sizes = tape.op("Shape", [mask])
    batch, length = (tape.op("Gather", [sizes, number[index]]) for index in (0, 1))
    end = tape.op("Add", [tape.op("Mul", [batch, length]), number[1]])
    starts = tape.op("Range", [number[0], end, length])  # batch + 1 of them
    lengths, starts = (tape.op("Cast", [value], {"to": ir.DataType.INT32}) for value in (lengths, starts))
    joined = tape.op("Concat", [lengths, starts, starts], {"axis": 0}, name="cuda.mask")
    joined.name, joined.dtype, joined.shape = "cuda.key_lengths", ir.DataType.INT32, ir.Shape([None])
    graph.insert_before(graph[0], tape.nodes)
    for node in nodes:
        node.replace_input_with(_MASK, joined)


def _mask_by_bias(graph: ir.Graph, mask: ir.Value, nodes: list[ir.Node]) -> None:
    """Padding on the left is no length: it becomes a bias, [batch, 1, length, length].

    CPUs and GPUs read the places of keys differently, so they would be of no use here.
    """
    tape = ir.tape.Tape()
    axes = add_constant(graph, "cuda.heads", np.array([1, 2], np.int64))
    zero, low = (add_constant(graph, f"cuda.{n:g}", np.array(n, np.float32)) for n in (0.0, MASKED))
    seen = tape.op("Cast", [tape.op("Unsqueeze", [mask, axes])], {"to": ir.DataType.BOOL})
    row = tape.op("Where", [seen, zero, low])  # [batch, 1, 1, length]
    one = add_constant(graph, "cuda.ones", np.array([1, 1], np.int64))
    length = tape.op("Shape", [mask], {"start": 1, "end": 2})
    square = tape.op("Concat", [one, length, length], {"axis": 0})
    bias = tape.op("Expand", [row, square])
    for value in (row, bias):
        value.dtype = ir.DataType.FLOAT
    graph.insert_before(graph[0], tape.nodes)
    for node in nodes:
        own = _input(node, _BIAS)
        total = bias
        if own is not None:
            add = ir.node("Add", [own, bias])
            graph.insert_before(node, add)
            total = add.outputs[0]
            total.dtype = ir.DataType.FLOAT
        node.resize_inputs(_BIAS + 1)
        node.replace_input_with(_MASK, None)
        node.replace_input_with(_BIAS, total)
