"""onnxruntime on GPUs: a session for each, inputs and outputs bound to the device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.backends.onnxruntime_session import Graph, OnnxModel, import_onnxruntime, open_session
from sbert_infer.errors import EngineError

__all__ = ["OnnxCudaBackend"]

_MAX_BATCH_TOKENS = 16384  # not measured: a GPU wants batches much larger than a CPU's
_WORKERS_PER_GPU = 2  # while one copies, the other computes
_MEMORY = "cuda"  # what onnxruntime calls a GPU's memory


class OnnxCudaBackend:
    """Runs a checked ONNX model with onnxruntime's CUDA provider."""

    edges: tuple[int, ...] | None = None
    threads = 1

    def __init__(self, model: OnnxModel, gpus: Sequence[int], *, max_batch_tokens: int | None = None) -> None:
        self.device = ",".join(f"cuda:{gpu}" for gpu in gpus)
        self.workers = _WORKERS_PER_GPU * len(gpus)
        self.max_batch_tokens = self.min_batch_tokens = max_batch_tokens or _MAX_BATCH_TOKENS
        self._free: SimpleQueue[tuple[int, Any]] = SimpleQueue()  # GPU and session, one entry for each worker
        self._closed = False
        sessions = [(gpu, _open(model, gpu)) for gpu in gpus]
        self._graph = Graph.of(sessions[0][1])
        for _ in range(_WORKERS_PER_GPU):
            for entry in sessions:
                self._free.put(entry)

    def run(
        self,
        input_ids: npt.NDArray[np.int64],
        attention_mask: npt.NDArray[np.int64],
        prompt_length: int = 0,
        *,
        alone: bool = False,
    ) -> npt.NDArray[np.float32]:
        """[batch, length] ids and mask -> [batch, dim] vectors."""
        gpu, session = self._free.get()
        try:
            if self._closed:
                raise EngineError("the engine was closed during this call")
            return _run(session, gpu, self._graph, input_ids, attention_mask, prompt_length)
        except EngineError:
            raise
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise EngineError(f"onnxruntime failed on a batch of {input_ids.shape} tokens: {error}") from error
        finally:
            self._free.put((gpu, session))

    def describe(self) -> str:
        """What runs and where, in a few words."""
        return f"onnxruntime {import_onnxruntime().__version__} on {self.device}"

    def close(self) -> None:
        """Free the model. A second call does nothing."""
        if not self._closed:
            self._closed = True
            for _ in range(self.workers):  # runs that are under way end first
                self._free.get()
            for _ in range(self.workers):
                self._free.put((0, None))


def _open(model: OnnxModel, gpu: int) -> Any:
    """A session that really is on the GPU: onnxruntime falls back to the CPU without a word."""
    onnxruntime = import_onnxruntime()
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        fix = "pip uninstall -y onnxruntime && pip install 'sbert-infer[gpu]'"
        raise EngineError(f"the installed onnxruntime has no CUDA provider: {fix}")
    session = open_session(model, 1, [("CUDAExecutionProvider", {"device_id": gpu}), "CPUExecutionProvider"])
    if "CUDAExecutionProvider" not in session.get_providers():
        raise EngineError(
            f"onnxruntime {onnxruntime.__version__} can't use cuda:{gpu}: its CUDA provider did not start (is the "
            "driver, and are CUDA and cuDNN, of the versions that it needs?)"
        )
    return session


def _run(
    session: Any,
    gpu: int,
    graph: Graph,
    input_ids: npt.NDArray[np.int64],
    attention_mask: npt.NDArray[np.int64],
    prompt_length: int,
) -> npt.NDArray[np.float32]:
    make = import_onnxruntime().OrtValue.ortvalue_from_numpy
    binding = session.io_binding()
    for name, values in graph.inputs(input_ids, attention_mask).items():
        binding.bind_ortvalue_input(name, make(np.ascontiguousarray(values), _MEMORY, gpu))
    if prompt_length or _needs_prompt_length(session):
        binding.bind_ortvalue_input("prompt_length", make(np.array(prompt_length)))
    binding.bind_output(graph.output, _MEMORY, gpu)
    session.run_with_iobinding(binding)
    vectors: npt.NDArray[np.float32] = binding.copy_outputs_to_cpu()[0]
    return vectors


def _needs_prompt_length(session: Any) -> bool:
    return any(value.name == "prompt_length" for value in session.get_inputs())
