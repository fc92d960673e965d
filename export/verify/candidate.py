"""What may be compared with the reference: an artifact, opened as a user would, or a graph on its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import torch

from sbert_infer.engine import Engine
from sbert_infer.errors import EngineError
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.verify.fp16_emulation import emulate_half

__all__ = ["Candidate", "EngineCandidate", "GraphCandidate"]

Vectors = npt.NDArray[np.float32]


class Candidate(Protocol):
    """Gives vectors [texts, dim]. Is called from several threads at once, and raises `EngineError`."""

    def encode(self, texts: Sequence[str], prompt: str = "") -> Vectors:
        """In batches of its own choice."""
        ...

    def run_together(self, texts: Sequence[str]) -> Vectors:
        """In one batch."""
        ...


class EngineCandidate:
    """An artifact in an open engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.truncate_dim = None

    def encode(self, texts: Sequence[str], prompt: str = "") -> Vectors:
        """As a user would."""
        vectors: Vectors = self._engine.encode(texts, prompt=prompt)
        return vectors

    def run_together(self, texts: Sequence[str]) -> Vectors:
        """As a user never would."""
        return self._engine.pipeline.run_together(texts)


class GraphCandidate:
    """A serialized graph in onnxruntime on the CPU; tokens, and pooling if the graph has none, by `reference`."""

    def __init__(self, model: bytes, reference: Reference, *, weights: bytes | None = None) -> None:
        """Load an FP16 graph, or with `weights`, the bytes of `model.onnx`, the twin of that file.

        The FP16 graph is run with its rounding made explicit; see `fp16_emulation.py`.
        """
        self._reference = reference
        self._tokenizing = threading.Lock()  # the tokenizer must not be used by two threads at once
        try:
            self._session: Any = _open_half(model) if weights is None else _open_twin(model, weights)
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise EngineError(f"onnxruntime {onnxruntime.__version__} can't load the graph: {error}") from error
        self._output = self._session.get_outputs()[0].name

    def encode(self, texts: Sequence[str], prompt: str = "") -> Vectors:
        """In one batch."""
        with self._tokenizing:
            ids, mask = self._reference.tokenize([prompt + text for text in texts])
            prompt_length = self._reference.prompt_length(prompt)
        inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        pooled = self._output == "sentence_embedding"
        if pooled and not self._reference.checkpoint.pooling.include_prompt:
            inputs["prompt_length"] = np.array(prompt_length)
        try:
            output = self._session.run([self._output], inputs)[0]
        except Exception as error:  # as above
            raise EngineError(f"onnxruntime {onnxruntime.__version__} can't run the graph: {error}") from error
        vectors: Vectors = output if pooled else self._pool(output, mask, prompt_length)
        if not np.isfinite(vectors).all():
            raise EngineError("the graph gives NaN or infinity")
        return vectors

    def run_together(self, texts: Sequence[str]) -> Vectors:
        """In one batch."""
        return self.encode(texts)

    @torch.inference_mode()
    def _pool(self, tokens: Vectors, mask: torch.Tensor, prompt_length: int) -> Vectors:
        reference = self._reference
        pooled = reference.pooling(torch.from_numpy(tokens), mask, torch.tensor(prompt_length))
        vectors: Vectors = reference.head(pooled).numpy()
        return vectors


def _open_half(model: bytes) -> Any:
    """In a file, with its weights in another: in FP32 they may be more than the 2 GB that one may hold."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "emulated.onnx"
        ir.save(emulate_half(model), path, external_data="weights")
        return _session(path, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)


def _open_twin(model: bytes, weights: bytes) -> Any:
    """In a file, since onnxruntime before 1.24 takes the weights from nowhere else."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "model.onnx").write_bytes(weights)
        path = Path(folder) / "cpu.onnx"
        path.write_bytes(model)
        return _session(path, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC)


def _session(path: Path, level: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
