"""The TensorRT backend: several slots per GPU, so that some can copy while another computes."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

from sbert_infer.artifact.manifest import SENTENCE
from sbert_infer.backends.base import CLOSED, Array, Batch
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.loaded_engine import Interface, LoadedEngine
from sbert_infer.backends.tensorrt.slot import Pooler, Slot
from sbert_infer.backends.tensorrt.versions import TensorRT
from sbert_infer.errors import EngineError
from sbert_infer.text.packing import Packer

# By simulation (docs/gpu.md), two keep a GPU busy that runs a base-size model; the third helps a
# small model on a fast GPU, whose batches are short beside what Python does for each.
_SLOTS_PER_DEVICE = 3


class TensorRTBackend:
    """Runs a TensorRT engine on one or more GPUs of the kind that it was built for."""

    threads = 1
    length_multiple = 1
    outputs: tuple[str, ...] = (SENTENCE,)
    # Smaller batches do not keep a GPU busy, so a small call is not split further.
    min_batch_tokens = 2048
    spare_workers = 0  # a batch takes a few ms

    def __init__(
        self,
        trt: TensorRT,
        engine: bytes,
        packer: Packer,
        interface: Interface,
        *,
        devices: Sequence[int] = (0,),
        cuda_graphs: bool = True,
        pooler: Pooler | None = None,
    ) -> None:
        """Load the TensorRT engine onto each of `devices`, and run each shape once.

        Args:
            trt: the TensorRT that built it.
            engine: the serialized TensorRT engine.
            packer: packs texts into the shapes that it was built for.
            interface: the names of its tensors.
            devices: indices of GPUs, all of one kind.
            cuda_graphs: launch each shape as a CUDA graph.
            pooler: pools the token vectors, if the TensorRT engine returns those.

        """
        if problem := cuda.driver_problem():  # checked before TensorRT is used: it may crash without a driver
            raise EngineError(f"no engine can run here: {problem}")
        _check_devices(devices)
        self.device = ",".join(f"cuda:{device}" for device in devices)
        self.packer: Packer | None = packer
        self.workers = _SLOTS_PER_DEVICE * len(devices)
        self.max_batch_tokens = packer.max_tokens
        self._trt, self._devices = trt, devices
        self._shapes = {(shape.rows, shape.length) for shape in packer.shapes}
        self._pid, self._closed, self._changed = os.getpid(), False, threading.Condition()
        with ExitStack() as made:  # frees what was made so far if memory runs out
            engines = [LoadedEngine(trt, engine, packer.shapes, interface, device, cuda_graphs) for device in devices]
            for loaded in engines:
                made.callback(loaded.close)
            self._free = [_owned_slot(made, loaded, packer, pooler) for loaded in engines * _SLOTS_PER_DEVICE]
            for loaded in engines:
                loaded.save_kernels()  # those of every shape, which the slots have run
            # If never closed, memory is freed with the object, or when the interpreter exits.
            self._free_all = weakref.finalize(self, _close_in, self._pid, made.pop_all())

    def run(self, batch: Batch, outputs: Sequence[str], *, alone: bool = False) -> list[Array]:
        """Run a packed batch, in one of the packer's shapes; return its vectors, [texts, dim]."""
        if tuple(outputs) != self.outputs:
            raise EngineError(f"a TensorRT engine gives {', '.join(self.outputs)} only, not {', '.join(outputs)}")
        if batch.packing is None or batch.shape not in self._shapes:
            shapes = ", ".join(f"{rows} x {length}" for rows, length in sorted(self._shapes))
            raise EngineError(f"the TensorRT engine runs packed rows of {shapes}, not {batch.shape}")
        slot = self._take()
        try:
            return [slot.run(batch)]
        finally:
            with self._changed:
                self._free.append(slot)
                self._changed.notify_all()

    def describe(self) -> str:
        """Return a short description of what runs and where."""
        where = ", ".join(f"{cuda.device_name(device)} (cuda:{device})" for device in self._devices)
        return f"{self._trt.name} {self._trt.version} on {where}"

    def close(self) -> None:
        """Wait for running batches and free everything. Do nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._free) == self.workers)
        self._free_all()

    def _take(self) -> Slot:
        if os.getpid() != self._pid:
            fix = "start processes by multiprocessing's 'spawn', and open it there"
            raise EngineError(f"this engine was opened before a fork, which CUDA does not survive: {fix}")
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise EngineError(CLOSED)
            return self._free.pop(self._idlest())

    def _idlest(self) -> int:
        """Return the index of a free slot on the GPU that has most of them."""
        free = Counter(slot.engine.device for slot in self._free)
        return max(range(len(self._free)), key=lambda index: free[self._free[index].engine.device])


def _check_devices(devices: Sequence[int]) -> None:
    count = cuda.device_count()
    if not devices or len(set(devices)) < len(devices) or not all(0 <= device < count for device in devices):
        raise EngineError(f"devices must be different GPUs among 0 to {count - 1}, got {list(devices)}")


def _owned_slot(made: ExitStack, loaded: LoadedEngine, packer: Packer, pooler: Pooler | None) -> Slot:
    slot = Slot(loaded, packer.shapes, pooler)
    made.callback(slot.close)
    return slot


def _close_in(pid: int, resources: ExitStack) -> None:
    if os.getpid() == pid:
        resources.close()
