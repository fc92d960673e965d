"""Looking into exported graphs, and running them in plain onnxruntime, without the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from sbert_infer.artifact import open_artifact
from sbert_infer.text.tokenizer import Tokenizer

Array = npt.NDArray[Any]


def tokens(path: Path, texts: Sequence[str]) -> dict[str, Array]:
    """The padded inputs of the artifact's graph for `texts`."""
    artifact = open_artifact(path)
    manifest = artifact.manifest
    tokenized = Tokenizer(artifact.tokenizer_json, manifest.max_length, manifest.truncation_side)(texts)
    rows, length = np.arange(len(texts)), int(tokenized.lengths.max())
    ids, mask, _ = tokenized.padded(rows, length, manifest.pad_id, manifest.padding_side)
    return {"input_ids": ids, "attention_mask": mask}


def open_session(model: Path | onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Open the artifact with plain onnxruntime."""
    content = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


def run(model: Path | onnx.ModelProto, inputs: dict[str, Array]) -> Array:
    """The graph's vectors [batch, dim]."""
    vectors: Array = open_session(model).run(["sentence_embedding"], inputs)[0]
    return vectors


def constants(model: onnx.ModelProto) -> dict[str, Array]:
    """The graph's initializers by name."""
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def nodes(model: onnx.ModelProto, *op_types: str) -> list[onnx.NodeProto]:
    """The graph's nodes of these types; of a branch with two sides, those of the second."""
    return [node for node in _flat(model.graph) if node.op_type in op_types]


def _flat(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        branches = {attribute.name: attribute.g for attribute in node.attribute}
        yield from _flat(branches["else_branch"]) if node.op_type == "If" else [node]


def cosine(a: Array, b: Array) -> Array:
    """The cosine of each row."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    result: Array = (x * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))
    return result


def assert_close(vectors: Array, expected: Array, atol: float) -> None:
    """Assert equality within `atol`, relative to the longest vector.

    How the last bits of a sum fall depends on the processor, and they grow with the numbers.
    """
    length = float(np.linalg.norm(expected.astype(np.float64), axis=-1).max())
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=atol * max(1.0, length))
