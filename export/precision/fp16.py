"""The reference as an ONNX graph in FP16, for TensorRT and for onnxruntime on GPUs.

The types are in the graph, since TensorRT 11 supports nothing else. The transformer is FP16:
weights, products, sums. FP32 are
- the modules after it: pooling sums up hundreds of tokens, and its clamps (1e-9, 1e-12) are zero in
  FP16;
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
from torch import Tensor, nn
from torch.nn import functional as F

from sbert_infer.artifact.manifest import TOKENS
from sbert_infer.export.graph.operators import plain_operators
from sbert_infer.export.graph.trace import quiet_tracer, tidy, trace
from sbert_infer.export.reference.encoder import Reference


def to_half(reference: Reference, *, token_output: bool = False) -> ir.Model:
    """Convert `reference`, which is not changed, to strongly typed standard operators.

    The graph takes `input_ids` and `attention_mask`, and gives `sentence_embedding` in FP32 [batch,
    dim]. If the model excludes its prompt from pooling, it also takes `prompt_length`, without a
    default, which TensorRT would take for a constant.

    With `token_output` it gives `token_embeddings` in FP16 [batch, length, width] instead, to be
    pooled elsewhere.
    """
    half, checkpoint = _half_copy(reference), reference.checkpoint
    with quiet_tracer(), plain_operators(half.encoder):
        if token_output:
            return tidy(trace(_Half(half, pooled=False), checkpoint, prompt=False, outputs=(TOKENS,)))
        return tidy(trace(_Half(half, pooled=True), checkpoint, prompt=not checkpoint.pooling.include_prompt))


def _half_copy(reference: Reference) -> Reference:
    """A copy with its transformer in FP16; everything else is shared with `reference`."""
    norms = [module for module in reference.encoder.modules() if isinstance(module, nn.LayerNorm)]
    wide = {id(parameter) for norm in norms for parameter in norm.parameters()}
    shared = [*reference.parameters(), *reference.buffers(), reference.tokenizer, reference.checkpoint]
    copies: dict[int, Any] = {id(item): item for item in shared}
    for parameter in reference.encoder.parameters():
        if id(parameter) not in wide:
            copies[id(parameter)] = nn.Parameter(parameter.half(), requires_grad=False)
    for buffer in reference.encoder.buffers():
        copies[id(buffer)] = buffer.half() if buffer.is_floating_point() else buffer
    half = copy.deepcopy(reference, copies)  # uses the entries of `copies` instead of copying those objects
    for module in half.encoder.modules():
        if isinstance(module, nn.LayerNorm):
            setattr(module, "forward", MethodType(_wide_norm, module))  # noqa: B010  # mypy takes it for a method
    return half


def _wide_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps).to(x.dtype)


class _Half(nn.Module):
    """The token vectors in FP16; if `pooled`, pooling and the modules after it on them, in FP32."""

    def __init__(self, half: Reference, *, pooled: bool) -> None:
        super().__init__()
        self.reference, self.pooled = half, pooled

    def forward(self, input_ids: Tensor, attention_mask: Tensor, prompt_length: Tensor | None = None) -> Tensor:
        tokens = self.reference.token_vectors(input_ids, attention_mask).half()  # of several layers, the mean is FP32
        return self.reference.pool(tokens.float(), attention_mask, prompt_length) if self.pooled else tokens
