"""onnxruntime on the CPU: one session, single-threaded runs, called by as many threads as there are cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .cores import usable_cores
from .errors import EngineError

__all__ = ["OnnxBackend"]

# Activations of a batch this large stay in the cache; see docs/adr for the measurement.
_MAX_BATCH_TOKENS = 512


class OnnxBackend:
    """Runs a checked ONNX artifact with onnxruntime."""

    def __init__(
        self,
        path: Path,
        *,
        fused: bool = True,
        workers: int | None = None,
        threads: int | None = None,
        max_batch_tokens: int | None = None,
    ) -> None:
        self.threads = threads or 1
        self.workers = workers or max(1, usable_cores() // self.threads)
        self.max_batch_tokens = max_batch_tokens or _MAX_BATCH_TOKENS
        onnxruntime = _import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if fused:  # the export did better than onnxruntime's own fusions, which would undo some of it
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        try:
            self._session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise EngineError(f"{path}: onnxruntime {onnxruntime.__version__} can't load it: {error}") from error
        self._version: str = onnxruntime.__version__

    def run(
        self, input_ids: npt.NDArray[np.int64], attention_mask: npt.NDArray[np.int64], prompt_length: int = 0
    ) -> npt.NDArray[np.float32]:
        """[batch, length] ids and mask -> [batch, dim] vectors."""
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if prompt_length:
            inputs["prompt_length"] = np.array(prompt_length)
        if (session := self._session) is None:
            raise EngineError("the engine was closed during this call")
        try:
            vectors: npt.NDArray[np.float32] = session.run(["sentence_embedding"], inputs)[0]
        except Exception as error:  # as above
            raise EngineError(f"onnxruntime failed on a batch of {input_ids.shape} tokens: {error}") from error
        return vectors

    def describe(self) -> str:
        """What runs and where, in a few words."""
        return f"onnxruntime {self._version} on CPU, {self.workers} workers x {self.threads} threads"

    def close(self) -> None:
        """Free the model."""
        self._session = None


def _import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise EngineError("onnxruntime is not installed: pip install 'sbert-infer[cpu]'") from error
    if not hasattr(onnxruntime, "InferenceSession"):  # what uninstalling one of two onnxruntime packages leaves
        fix = "pip uninstall -y onnxruntime onnxruntime-gpu, then install the one you need"
        raise EngineError(f"the installed onnxruntime is broken: {fix}")
    return onnxruntime
