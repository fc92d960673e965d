"""The reference as an ONNX graph in FP16 or BF16, on packed rows, for TensorRT.

The types are in the graph, since TensorRT 11 supports nothing else. The transformer is FP16:
weights, products, sums. So are the products after it, of pooling and of Dense, since TensorRT-RTX
has none of FP32 for sm75 (and would round their operands to 11 bits elsewhere: TF32). FP32 are
- what follows those products: the clamps of normalisation (1e-9, 1e-12) are zero in FP16;
- layer normalisation, whose squares overflow from 256 on. Its operator has an attribute for that,
  `stash_type`, but parsers drop it.
The softmax is FP16: on MiniLM its type makes no difference (1 - cosine is 1.3e-6 at worst either
way), and even if its exponentials were summed in FP16 it would be 1e-5.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sbert_infer.export.graph.operators import plain_operators
from sbert_infer.export.graph.trace import quiet_tracer, tidy, trace_packed
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.reference.packed import PackedReference


def to_half(reference: Reference, dtype: torch.dtype = torch.float16) -> ir.Model:
    """Convert `reference`, which is not changed, to strongly typed standard operators.

    The graph takes packed rows (`reference/packed.py`), and gives `sentence_embedding` in FP32
    [rows, segments, dim], and `token_embeddings` in `dtype` [rows, length, width].
    """
    packed = PackedReference(_half_copy(reference, dtype), dtype)
    with quiet_tracer(), plain_operators(packed.reference.encoder, packed.segments):
        return tidy(trace_packed(packed, reference.checkpoint))


def _half_copy(reference: Reference, dtype: torch.dtype) -> Reference:
    """A copy with its transformer in `dtype`, and the matrices of Dense; the rest is shared."""
    norms = [module for module in reference.encoder.modules() if isinstance(module, nn.LayerNorm)]
    wide = {id(parameter) for norm in norms for parameter in norm.parameters()}
    shared = [*reference.parameters(), *reference.buffers(), reference.tokenizer, reference.checkpoint]
    copies: dict[int, Any] = {id(item): item for item in shared}
    matrices = [module.weight for module in reference.head.modules() if isinstance(module, nn.Linear)]
    for parameter in [*reference.encoder.parameters(), *matrices]:
        if id(parameter) not in wide:
            copies[id(parameter)] = nn.Parameter(parameter.to(dtype), requires_grad=False)
    for buffer in reference.encoder.buffers():
        copies[id(buffer)] = buffer.to(dtype) if buffer.is_floating_point() else buffer
    half = copy.deepcopy(reference, copies)  # uses the entries of `copies` instead of copying those objects
    for module in half.encoder.modules():
        if isinstance(module, nn.LayerNorm):
            setattr(module, "forward", MethodType(_wide_norm, module))  # noqa: B010  # mypy takes it for a method
    for module in half.head.modules():
        if isinstance(module, nn.Linear):
            setattr(module, "forward", MethodType(_narrow_linear, module))  # noqa: B010  # as above
    return half


def _wide_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps).to(x.dtype)


def _narrow_linear(self: nn.Linear, x: Tensor) -> Tensor:
    product = F.linear(x.to(self.weight.dtype), self.weight).float()
    return product if self.bias is None else product + self.bias
