"""onnxruntime on GPUs: one session for each, with inputs and outputs in the GPU's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.plan_file import CUDA_GRAPH
from sbert_infer.backends.base import CLOSED, Array, Batch
from sbert_infer.backends.onnxruntime_install import CUDA_PROVIDER, not_started, preload_cuda, require_cuda
from sbert_infer.backends.onnxruntime_session import Graph, OnnxModel, PlanModel, import_onnxruntime, open_session
from sbert_infer.errors import EngineError
from sbert_infer.text.packing import Packer

_MAX_BATCH_TOKENS = 16384  # not measured; a GPU needs much larger batches than a CPU
_WORKERS_PER_GPU = 2  # while one copies, the other computes
_MEMORY = "cuda"  # onnxruntime's name for a GPU's memory
# Its memory-efficient attention takes a bias only for lengths that are a multiple of this (in
# contrib_ops/cuda/bert/multihead_attention.cc), and tensor cores take FP16 in blocks of 8.
_LENGTH_MULTIPLE = 8


class OnnxCudaBackend:
    """Runs a checked ONNX model with onnxruntime's CUDA provider."""

    packer: Packer | None = None
    threads = 1
    spare_workers = 0  # a batch takes a few ms

    def __init__(self, model: OnnxModel, gpus: Sequence[int], *, max_batch_tokens: int | None = None) -> None:
        self.device = ",".join(f"cuda:{gpu}" for gpu in gpus)
        self.workers = _WORKERS_PER_GPU * len(gpus)
        half = isinstance(model, PlanModel) and model.name == CUDA_GRAPH  # FP32 has no such kernels
        self.length_multiple = _LENGTH_MULTIPLE if half else 1
        self.max_batch_tokens = self.min_batch_tokens = max_batch_tokens or _MAX_BATCH_TOKENS
        self._free: SimpleQueue[tuple[int, Any]] = SimpleQueue()  # (GPU, session) for each idle worker
        self._closed = False
        sessions = [(gpu, _open(model, gpu)) for gpu in gpus]
        self._graph = Graph.of(sessions[0][1])
        self.outputs = self._graph.outputs
        for _ in range(_WORKERS_PER_GPU):
            for entry in sessions:
                self._free.put(entry)

    def run(self, batch: Batch, outputs: Sequence[str], *, alone: bool = False) -> list[Array]:
        """Run a batch and return the `outputs` in that order, each [rows, ...]."""
        gpu, session = self._free.get()
        try:
            if self._closed:
                raise EngineError(CLOSED)
            return _run(session, gpu, self._graph.feed(batch), outputs)
        except EngineError:
            raise
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise EngineError(f"onnxruntime failed on a batch of {batch.shape} tokens: {error}") from error
        finally:
            self._free.put((gpu, session))

    def describe(self) -> str:
        """Return a short description of what runs and where."""
        return f"onnxruntime {import_onnxruntime().__version__} on {self.device}"

    def close(self) -> None:
        """Free the model. A second call does nothing."""
        if not self._closed:
            self._closed = True
            for _ in range(self.workers):  # wait until all workers are idle
                self._free.get()
            for _ in range(self.workers):
                self._free.put((0, None))


def provider_options(model: OnnxModel, gpu: int) -> dict[str, str]:
    """Return the options of onnxruntime's CUDA provider; others keep their defaults."""
    return {
        "device_id": str(gpu),
        # TF32 has 10 bits of fraction: enough for the 16-bit weights of a plan, too few for FP32.
        "use_tf32": str(int(isinstance(model, PlanModel))),
        # Before 1.28 a fused norm summed up in FP16 without this; later versions ignore it.
        "enable_skip_layer_norm_strict_mode": "1",
    }


def _open(model: OnnxModel, gpu: int) -> Any:
    """Open a session and check that it uses the GPU: onnxruntime silently falls back to the CPU."""
    onnxruntime = import_onnxruntime()
    require_cuda(onnxruntime)
    preload_cuda(onnxruntime)
    providers = [(CUDA_PROVIDER, provider_options(model, gpu)), "CPUExecutionProvider"]
    # Batches have hundreds of shapes: to plan the memory of each keeps a plan for each, and takes
    # one large block a run, for which an arena in pieces has to grow.
    session = open_session(model, 1, providers, plan_memory=False)
    if CUDA_PROVIDER not in session.get_providers():
        raise EngineError(not_started(onnxruntime, gpu))
    return session


def _run(session: Any, gpu: int, inputs: Mapping[str, npt.NDArray[np.int64]], outputs: Sequence[str]) -> list[Array]:
    make = import_onnxruntime().OrtValue.ortvalue_from_numpy
    binding = session.io_binding()
    for name, values in inputs.items():
        where = () if name == "prompt_length" else (_MEMORY, gpu)  # shapes are computed on the host
        binding.bind_ortvalue_input(name, make(np.asarray(values, order="C"), *where))
    for name in outputs:
        binding.bind_output(name, _MEMORY, gpu)
    session.run_with_iobinding(binding)
    found: list[Array] = binding.copy_outputs_to_cpu()
    return found
