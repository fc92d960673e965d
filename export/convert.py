"""The eager reference as an ONNX graph: input_ids, attention_mask -> sentence_embedding."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass

import sbert_infer
from sbert_infer.artifact import PRODUCER
from sbert_infer.errors import ExportError
from sbert_infer.export.constants import share_equal_constants
from sbert_infer.export.fuse import fuse
from sbert_infer.export.operators import fused_operators
from sbert_infer.export.reference import Reference

__all__ = ["OPSET", "convert"]

OPSET = 18  # the newest whose graphs onnxscript's fusions for onnxruntime recognise


def convert(reference: Reference, *, portable: bool = False) -> ir.Model:
    """Convert `reference`. A portable graph has standard operators only; else it is fused for onnxruntime."""
    with _quiet_tracer():
        with nullcontext() if portable else fused_operators(reference.encoder):
            model = _trace(reference)
        if not portable:
            model = fuse(model)
        _default_prompt_length(model)
        share_equal_constants(model.graph)
        ClearMetadataAndDocStringPass()(model)  # the tracer's stack traces, with paths of this machine
    model.producer_name, model.producer_version = PRODUCER, sbert_infer.__version__
    return model


def _trace(reference: Reference) -> ir.Model:
    batch = torch.export.Dim("batch")
    length = torch.export.Dim("length", max=reference.checkpoint.max_length)
    ids = torch.ones(2, 3, dtype=torch.int64)  # sizes over 1: torch.export takes 0 and 1 for constants
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    shapes: dict[str, object] = {name: {0: batch, 1: length} for name in inputs}
    if not reference.checkpoint.pooling.include_prompt:
        inputs["prompt_length"] = torch.tensor(1)
        shapes["prompt_length"] = {}
    try:
        program = torch.onnx.export(
            reference,
            kwargs=inputs,
            dynamic_shapes=shapes,
            input_names=list(inputs),
            output_names=["sentence_embedding"],
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise ExportError(f"{reference.checkpoint.model_type}: torch can't export this model: {reason}") from error
    assert program is not None  # noqa: S101  # None only when a path is given
    return program.model


def _default_prompt_length(model: ir.Model) -> None:
    """Give `prompt_length` a default of 0: an input that is also an initializer may be left out.

    After fusion, which would take the default for a constant.
    """
    for value in model.graph.inputs:
        if value.name == "prompt_length":
            value.const_value = ir.tensor(np.int64(0), name="prompt_length")
            model.graph.initializers["prompt_length"] = value


@contextmanager
def _quiet_tracer() -> Iterator[None]:
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
