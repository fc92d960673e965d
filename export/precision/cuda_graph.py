"""The CUDA graph of a plan: onnxruntime's fused operators in FP16, for GPUs without TensorRT.

Its weights are ranges of the FP16 model's file, as those of the CPU graph, except for FP32 matrices
after pooling. It is made from the fused FP32 graph, whose patterns the fusions know, by choosing a
type for each node:

- what is computed from token ids and positions alone stays FP32: FP16 can't count to 2049, which
  would be the end of rotary positions;
- what depends on the embeddings is FP16, up to the token vectors;
- pooling and what follows is FP32.

The norms are FP16 operators that sum in FP32: `LayerNormalization` always did
(core/providers/cuda/nn/layer_norm_impl.cu), `SkipLayerNormalization` does since onnxruntime 1.28
and before that in the strict mode that the runtime asks for
(contrib_ops/cuda/bert/skip_layer_norm.cc). So does attention in its softmax. BiasGelu, Gelu,
FastGelu, SkipSimplifiedLayerNormalization and GroupQueryAttention have FP16 kernels as well
(docs/OperatorKernels.md), and so has all else but `ArgMax` of the mask, which finds the token of
CLS pooling on the CPU. What the graph for CPUs has of its own, a branch without a mask and biases
in `Gemm`, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from sbert_infer.artifact.manifest import TOKENS
from sbert_infer.errors import ExportError
from sbert_infer.export.precision.borrowed_weights import Lender

HALF, FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
# Sums and powers overflow in FP16 where their parts do not; a norm that was not fused has them.
_WIDE = {"Exp", "Pow", "Reciprocal", "ReduceL2", "ReduceMean", "ReduceSum", "Softmax", "Sqrt"}


def make_cuda_graph(fused: ir.Model, half_model: bytes) -> bytes:
    """Turn `fused`, an FP32 graph with the output `token_embeddings`, to FP16, and serialize it.

    Its matrices are taken from `half_model`, the FP16 model. `fused` itself is changed.
    """
    converter = _Converter(fused.graph, Lender(half_model))
    converter.convert()
    RemoveUnusedNodesPass()(fused)
    serialized: bytes = ir.to_proto(fused).SerializeToString()
    return serialized


class _Converter:
    """Gives each node of the transformer its type, in order, with casts in between."""

    def __init__(self, graph: ir.Graph, lender: Lender) -> None:
        self._graph, self._lender = graph, lender
        (tokens,) = [value for value in graph.outputs if value.name == TOKENS]
        self._encoder = set(_ancestors(tokens))
        self._narrow: set[ir.Value] = set()
        self._casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        graph.outputs.remove(tokens)

    def convert(self) -> None:
        """Convert the whole graph, once."""
        for node in list(self._graph):
            narrow = node in self._encoder and self._is_narrow(node)
            for index, value in enumerate(node.inputs):
                if value is not None and value.dtype in (HALF, FLOAT):
                    node.replace_input_with(index, self._as(value, HALF if narrow else FLOAT))
            for output in node.outputs if narrow else ():
                if output.dtype == FLOAT:
                    output.dtype = HALF
                    self._narrow.add(output)

    def _is_narrow(self, node: ir.Node) -> bool:
        if node.op_type in _WIDE:
            return False
        first = node.inputs[0] if node.inputs else None
        is_table = first is not None and first.const_value is not None and len(first.const_value.shape) > 1
        is_embedding = node.op_type == "Gather" and is_table and first is not None and first.dtype == FLOAT
        return is_embedding or any(value in self._narrow for value in node.inputs)

    def _as(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """`value` in `dtype`: itself, or a constant or a cast that is made once."""
        if value.dtype == dtype:
            return value
        if (value, dtype) not in self._casts:
            constant = value.const_value is not None and value.producer() is None
            self._casts[value, dtype] = self._constant(value) if constant else self._cast(value, dtype)
        return self._casts[value, dtype]

    def _constant(self, value: ir.Value) -> ir.Value:
        assert value.const_value is not None  # noqa: S101  # as `_as` saw to
        with np.errstate(over="ignore"):
            array = value.const_value.numpy().astype(np.float16)
        if not np.isfinite(array).all():
            raise ExportError(f"FP16 can't hold the constant {value.name} of the graph for onnxruntime on CUDA")
        tensor = self._lender.borrow(array) if array.ndim > 1 else ir.tensor(array)
        name = f"{value.name}.half"
        half = ir.Value(name=name, shape=value.shape, type=ir.TensorType(HALF), const_value=tensor)
        self._graph.initializers[name] = half
        return half

    def _cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        cast = ir.node("Cast", [value], {"to": dtype})
        result = cast.outputs[0]
        result.name = f"{value.name}.{'half' if dtype == HALF else 'float'}"
        result.shape, result.type = value.shape, ir.TensorType(dtype)
        producer = value.producer()
        if producer is None:
            self._graph.insert_before(self._graph[0], cast)
        else:
            self._graph.insert_after(producer, cast)
        return result


def _ancestors(value: ir.Value) -> Iterator[ir.Node]:
    """The nodes that `value` is computed by, each once."""
    waiting, seen = [value.producer()], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [parent.producer() for parent in node.inputs if parent is not None]
