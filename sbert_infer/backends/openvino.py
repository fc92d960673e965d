"""OpenVINO in BF16 on the CPU: one compiled model, and a request for each worker."""

from __future__ import annotations

import os
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from sbert_infer._util.cores import usable_cores
from sbert_infer.artifact.manifest import Artifact
from sbert_infer.artifact.onnx_file import Part
from sbert_infer.backends.base import CLOSED, Array, Batch
from sbert_infer.backends.onnxruntime_session import Graph
from sbert_infer.backends.openvino_install import import_openvino, openvino_version
from sbert_infer.errors import EngineError
from sbert_infer.text.packing import Packer

_MAX_BATCH_TOKENS = 512  # as with onnxruntime: the activations stay in the cache
# OpenVINO compiles for each shape. It keeps this many compiled parts, about five for a shape: those
# of fifty shapes take 200 MB. By default it keeps 5,000. A new shape costs 4 ms, as measured in
# docs/adr/0025.
_KEPT_PARTS = 256


class OpenVinoBackend:
    """Runs a checked ONNX model with OpenVINO in BF16."""

    device = "cpu"
    packer: Packer | None = None
    length_multiple = 1
    min_batch_tokens = 64  # as with onnxruntime
    spare_workers = 0  # a request beyond its streams would wait for one

    def __init__(
        self,
        artifact: Artifact,
        *,
        workers: int | None = None,
        threads: int | None = None,
        max_batch_tokens: int | None = None,
    ) -> None:
        self.threads = threads or 1
        self.workers = workers or max(1, usable_cores() // self.threads)
        self.max_batch_tokens = max_batch_tokens or _MAX_BATCH_TOKENS
        self._process = os.getpid()
        self._closed = False
        compiled = _compile(artifact, self.workers, self.threads)
        self._graph = Graph(
            frozenset(value.get_any_name() for value in compiled.inputs),
            tuple(value.get_any_name() for value in compiled.outputs),
        )
        self.outputs = self._graph.outputs
        self._idle: SimpleQueue[Any] = SimpleQueue()
        for _ in range(self.workers):
            self._idle.put(compiled.create_infer_request())

    def run(self, batch: Batch, outputs: Sequence[str], *, alone: bool = False) -> list[Array]:
        """Run a batch and return the `outputs` in that order, each [rows, ...]."""
        if os.getpid() != self._process:  # the threads of OpenVINO do not survive a fork: it would wait forever
            raise EngineError("OpenVINO can't be used after a fork: open the Engine in the new process")
        request = self._idle.get()
        try:
            if self._closed:
                raise EngineError(CLOSED)
            request.infer(self._graph.feed(batch), share_inputs=True, share_outputs=True)
            return [np.array(request.get_tensor(name).data) for name in outputs]  # its memory is used again
        except RuntimeError as error:  # all that OpenVINO raises
            raise EngineError(f"OpenVINO failed on a batch of {batch.shape} tokens: {error}") from error
        finally:
            self._idle.put(request)

    def describe(self) -> str:
        """Return a short description of what runs and where."""
        return f"OpenVINO {openvino_version()} on CPU, bf16, {self.workers} workers x {self.threads} threads"

    def close(self) -> None:
        """Free the model. A second call does nothing."""
        if not self._closed:
            self._closed = True
            for _ in range(self.workers if os.getpid() == self._process else 0):  # wait until all are idle
                self._idle.get()
            for _ in range(self.workers):
                self._idle.put(None)


def _compile(artifact: Artifact, workers: int, threads: int) -> Any:
    """Compile the model; raise `EngineError` if OpenVINO can't, or not in BF16."""
    openvino = import_openvino()
    options = {
        "INFERENCE_PRECISION_HINT": "bf16",
        "NUM_STREAMS": workers,
        "INFERENCE_NUM_THREADS": workers * threads,
        "ENABLE_CPU_PINNING": False,  # two processes would share a core, and leave another idle
        "CPU_RUNTIME_CACHE_CAPACITY": str(_KEPT_PARTS),
    }
    # Weights in a file of their own, over 2 GB, are found beside the model's.
    path = artifact.path
    content = str(path) if artifact.manifest.data_files else path.read_bytes()
    if isinstance(artifact, Part):
        content = artifact.read()
    try:
        core = openvino.Core()
        compiled = core.compile_model(core.read_model(content), "CPU", options)
        used = compiled.get_property("INFERENCE_PRECISION_HINT")
    except RuntimeError as error:
        what = " ".join(str(error).split())
        raise EngineError(f"OpenVINO {openvino_version()} can't load it: {what}") from error
    if used != openvino.Type.bf16:
        raise EngineError(f"OpenVINO {openvino_version()} would compute in {used.get_type_name()}")
    return compiled
