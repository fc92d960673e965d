"""The eager reference as an ONNX graph: input_ids, attention_mask -> sentence_embedding."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import nn

import sbert_infer
from sbert_infer.artifact import PRODUCER
from sbert_infer.errors import ExportError
from sbert_infer.export.checkpoint import Checkpoint
from sbert_infer.export.constants import share_equal_constants
from sbert_infer.export.fuse import fuse
from sbert_infer.export.operators import fused_operators, plain_operators
from sbert_infer.export.reference import Reference

__all__ = ["OPSET", "convert", "quiet_tracer", "tidy", "trace"]

OPSET = 18  # the newest whose graphs onnxscript's fusions for onnxruntime recognise


def convert(reference: Reference, *, portable: bool = False) -> ir.Model:
    """Convert `reference`. A portable graph has standard operators only; else it is fused for onnxruntime."""
    with quiet_tracer():
        with plain_operators(reference.encoder) if portable else fused_operators(reference.encoder):
            model = trace(reference, reference.checkpoint, prompt=not reference.checkpoint.pooling.include_prompt)
        if not portable:
            model = fuse(model)
        _default_prompt_length(model)
        return tidy(model)


def trace(module: nn.Module, checkpoint: Checkpoint, *, prompt: bool, output: str = "sentence_embedding") -> ir.Model:
    """The graph of `module` for batches of any size and length. With `prompt` it also takes a `prompt_length`."""
    batch = torch.export.Dim("batch")
    length = torch.export.Dim("length", max=checkpoint.max_length)
    ids = torch.ones(2, 3, dtype=torch.int64)  # sizes over 1: torch.export takes 0 and 1 for constants
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    shapes: dict[str, object] = {name: {0: batch, 1: length} for name in inputs}
    if prompt:
        inputs["prompt_length"] = torch.tensor(1)
        shapes["prompt_length"] = {}
    try:
        program = torch.onnx.export(
            module,
            kwargs=inputs,
            dynamic_shapes=shapes,
            input_names=list(inputs),
            output_names=[output],
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise ExportError(f"{checkpoint.model_type}: torch can't export this model: {reason}") from error
    assert program is not None  # noqa: S101  # None only when a path is given
    return program.model


def tidy(model: ir.Model) -> ir.Model:
    """Store equal constants once, and nothing of the machine that this ran on."""
    share_equal_constants(model.graph)
    ClearMetadataAndDocStringPass()(model)  # the tracer's stack traces, with paths
    model.producer_name, model.producer_version = PRODUCER, sbert_infer.__version__
    return model


def _default_prompt_length(model: ir.Model) -> None:
    """Give `prompt_length` a default of 0: an input that is also an initializer may be left out.

    After fusion, which would take the default for a constant.
    """
    for value in model.graph.inputs:
        if value.name == "prompt_length":
            value.const_value = ir.tensor(np.int64(0), name="prompt_length")
            model.graph.initializers["prompt_length"] = value


@contextmanager
def quiet_tracer() -> Iterator[None]:
    """Without the chatter of torch's exporter and of the graph passes."""
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
