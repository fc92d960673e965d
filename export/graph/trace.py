"""The eager reference as an ONNX graph."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn

import sbert_infer
from sbert_infer.artifact.manifest import SENTENCE, SPARSE, TOKENS
from sbert_infer.artifact.onnx_file import PRODUCER
from sbert_infer.errors import ExportError
from sbert_infer.export.checkpoint.checkpoint import Checkpoint
from sbert_infer.export.graph.buckets import tabulated_buckets
from sbert_infer.export.graph.constants import share_equal_constants
from sbert_infer.export.graph.cuda_rewrites import tune_for_cuda
from sbert_infer.export.graph.fuse import fuse
from sbert_infer.export.graph.operators import fused_operators, plain_operators
from sbert_infer.export.reference.bge_m3 import TokenHeads
from sbert_infer.export.reference.encoder import Encoder, Reference
from sbert_infer.text.shapes import row_length

OPSET = 18  # the newest whose graphs onnxscript's fusions for onnxruntime recognise


def convert(
    reference: Reference,
    *,
    portable: bool = False,
    cuda: bool = False,
    token_output: bool = False,
    heads: TokenHeads | None = None,
) -> ir.Model:
    """Convert a sentence encoder: input_ids, attention_mask -> sentence_embedding.

    With `token_output` the graph also gives `token_embeddings` [batch, length, width], with `heads`
    the outputs of the heads. With `cuda` it is fused for onnxruntime's CUDA provider.
    """
    module = _WithTokens(reference, heads) if token_output or heads else reference
    outputs: tuple[str, ...] = (SPARSE if reference.checkpoint.is_sparse else SENTENCE,)
    if module is not reference:
        outputs = (SENTENCE, *heads.outputs) if heads else (SENTENCE, TOKENS)
    return build_graph(
        reference,
        outputs,
        portable=portable,
        cuda=cuda,
        module=module,
        prompt=not reference.checkpoint.pooling.include_prompt,
        padding_side=reference.tokenizer.padding_side,
    )


def build_graph(
    reference: Encoder,
    outputs: Sequence[str],
    *,
    portable: bool,
    cuda: bool = False,
    module: nn.Module | None = None,
    prompt: bool = False,
    token_types: bool = False,
    padding_side: str = "left",
) -> ir.Model:
    """Trace `module`, which is `reference` itself or a module around it.

    A portable graph has standard operators only; otherwise it is fused for onnxruntime. A causal
    model can do without a padding mask if padding is on the right.
    """
    checkpoint, encoder = reference.checkpoint, reference.encoder
    fused = fused_operators(encoder, padding_side=padding_side, max_length=_longest(checkpoint))
    with quiet_tracer():
        with plain_operators(encoder) if portable else fused:
            model = trace(module or reference, checkpoint, prompt=prompt, outputs=outputs, token_types=token_types)
        if not portable:
            model = fuse(model, cuda=cuda)
        for value, name in zip(model.graph.outputs, outputs, strict=True):
            value.name = name  # a fusion may have put another value in its place
        _default_prompt_length(model)
        return tidy(tune_for_cuda(model, padding_side) if cuda else model)


class _WithTokens(nn.Module):
    """The sentence vectors, and the token vectors or what `heads` compute from them."""

    def __init__(self, reference: Reference, heads: TokenHeads | None = None) -> None:
        super().__init__()
        self.reference, self.heads = reference, heads

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, prompt_length: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        tokens = self.reference.token_vectors(input_ids, attention_mask)
        more = (tokens,) if self.heads is None else self.heads(tokens)
        return self.reference.pool(tokens, attention_mask, prompt_length), *more


def _longest(checkpoint: Checkpoint) -> int:
    """The most tokens of a text that users may raise the limit to."""
    return max(checkpoint.max_length, checkpoint.max_positions or 0)


def trace(
    module: nn.Module,
    checkpoint: Checkpoint,
    *,
    prompt: bool,
    outputs: Sequence[str] = (SENTENCE,),
    token_types: bool = False,
) -> ir.Model:
    """The graph of `module` for batches of any size and length.

    With `prompt` it also takes a `prompt_length`, with `token_types` also `token_type_ids`.
    """
    batch = torch.export.Dim("batch")
    length = torch.export.Dim("length", max=_longest(checkpoint))
    ids = torch.ones(2, 3, dtype=torch.int64)  # sizes over 1: torch.export takes 0 and 1 for constants
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if token_types:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    shapes: dict[str, object] = {name: {0: batch, 1: length} for name in inputs}
    if prompt:
        inputs["prompt_length"] = torch.tensor(1)
        shapes["prompt_length"] = {}
    return _export(module, checkpoint, inputs, shapes, outputs)


def trace_packed(module: nn.Module, checkpoint: Checkpoint) -> ir.Model:
    """The graph of `module`, a `PackedReference`, for rows of any number, length and segments.

    Inputs that the model makes no use of, such as positions where they are relative, are left out.
    """
    rows, segments = torch.export.Dim("rows"), torch.export.Dim("segments")
    length = torch.export.Dim("length", max=row_length(checkpoint.max_length))
    # Two texts in each row, the first of one token and the second of two.
    values = {"input_ids": [1, 1, 1], "segment_ids": [1, 2, 2], "position_ids": [0, 0, 1], "starts": [0, 1]}
    inputs = {name: torch.tensor([row, row]) for name, row in {**values, "ends": [1, 3]}.items()}
    shapes: dict[str, object] = {name: {0: rows, 1: length} for name in inputs}
    shapes |= {name: {0: rows, 1: segments} for name in ("starts", "ends")}
    model = _export(module, checkpoint, inputs, shapes, (SENTENCE, TOKENS))
    _leave_out_unused(model.graph)
    return model


def _leave_out_unused(graph: ir.Graph) -> None:
    """Remove inputs of which nothing is used, or only the shape, which is that of the token ids."""
    ids, *others = (value for value in graph.inputs if str(value.name).endswith("_ids"))
    for value in others:
        for node, index in list(value.uses()):
            if node.op_type == "Shape":
                node.replace_input_with(index, ids)
        if not value.uses():
            graph.inputs.remove(value)


def _export(
    module: nn.Module,
    checkpoint: Checkpoint,
    inputs: dict[str, Tensor],
    shapes: dict[str, object],
    outputs: Sequence[str],
) -> ir.Model:
    try:
        with tabulated_buckets(module, _longest(checkpoint)):
            program = torch.onnx.export(
                module,
                kwargs=inputs,
                dynamic_shapes=shapes,
                input_names=list(inputs),
                output_names=list(outputs),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:
        raise ExportError(f"{checkpoint.model_type}: torch can't export this model: {_cause(error)}") from error
    assert program is not None  # noqa: S101  # None only when a path is given
    return program.model


def _cause(error: BaseException) -> str:
    """The first line of the original error: torch wraps it in advice on how to report a bug."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


def tidy(model: ir.Model) -> ir.Model:
    """Store equal constants once, and remove traces of the machine that exported the graph."""
    share_equal_constants(model.graph)
    ClearMetadataAndDocStringPass()(model)  # the tracer's stack traces, with paths
    model.producer_name, model.producer_version = PRODUCER, sbert_infer.__version__
    return model


def _default_prompt_length(model: ir.Model) -> None:
    """Give `prompt_length` a default of 0: an input that is also an initializer may be left out.

    Call it after fusion, which would take the default for a constant.
    """
    for value in model.graph.inputs:
        if value.name == "prompt_length":
            value.const_value = ir.tensor(np.int64(0), name="prompt_length")
            model.graph.initializers["prompt_length"] = value


@contextmanager
def quiet_tracer() -> Iterator[None]:
    """Silence torch's exporter and the graph passes."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
