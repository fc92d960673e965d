"""The TensorRT backend: two slots per GPU, so that one can copy while the other computes."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack

from sbert_infer.artifact.manifest import SENTENCE, TOKENS
from sbert_infer.artifact.profiles import Profile, most_tokens
from sbert_infer.backends.base import CLOSED, Array, Batch
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.loaded_engine import Interface, LoadedEngine
from sbert_infer.backends.tensorrt.slot import Pooler, Slot
from sbert_infer.backends.tensorrt.versions import TensorRT
from sbert_infer.errors import EngineError

_SLOTS_PER_DEVICE = 2


class TensorRTBackend:
    """Runs a TensorRT engine on one or more GPUs of the kind that it was built for."""

    threads = 1
    outputs: tuple[str, ...] = (SENTENCE,)
    # Smaller batches do not keep a GPU busy, so a small call is not split further.
    min_batch_tokens = 2048

    def __init__(
        self,
        trt: TensorRT,
        engine: bytes,
        profiles: Sequence[Profile],
        *,
        devices: Sequence[int] = (0,),
        dim: int,
        prompt_length: bool = False,
        cuda_graphs: bool = True,
        pooler: Pooler | None = None,
    ) -> None:
        """Load the TensorRT engine onto each of `devices`.

        Args:
            trt: the TensorRT that built the engine.
            engine: the serialized TensorRT engine.
            profiles: the shapes it was built for.
            devices: the GPUs to use.
            dim: the length of a vector.
            prompt_length: whether the model has the input `prompt_length`, because pooling leaves
                out the prompt's tokens.
            cuda_graphs: record the work of each shape once and launch it as a whole.
            pooler: pools token vectors, if the TensorRT engine returns those.

        """
        if problem := cuda.driver_problem():  # checked before TensorRT is used: it may crash without a driver
            raise EngineError(f"no engine can run here: {problem}")
        if pooler is not None and prompt_length:
            raise EngineError("a model that leaves its prompt out of pooling can't be pooled by the kernel")
        _check_devices(devices)
        self.device = ",".join(f"cuda:{device}" for device in devices)
        self.edges: tuple[int, ...] | None = tuple(sorted(profile.length for profile in profiles))
        self.workers = _SLOTS_PER_DEVICE * len(devices)
        self.max_batch_tokens = most_tokens(profiles)
        self._trt, self._devices = trt, devices
        self._most = {profile.length: profile.max_batch for profile in profiles}
        names = ("input_ids", "attention_mask", *(["prompt_length"] if prompt_length else []))
        interface = Interface(names, TOKENS if pooler else SENTENCE, dim)
        self._pid, self._closed, self._changed = os.getpid(), False, threading.Condition()
        with ExitStack() as made:  # frees what was made so far if memory runs out
            engines = [LoadedEngine(trt, engine, profiles, interface, device, cuda_graphs) for device in devices]
            for loaded in engines:
                made.callback(loaded.close)
            # Slots are taken from the end of the list, so the one used last is used again: it
            # already has its CUDA graphs.
            self._free = [_owned_slot(made, loaded, profiles, pooler) for loaded in engines * _SLOTS_PER_DEVICE][::-1]
            # If never closed, memory is freed with the object, or when the interpreter exits.
            self._free_all = weakref.finalize(self, _close_in, self._pid, made.pop_all())

    def run(self, batch: Batch, outputs: Sequence[str], *, alone: bool = False) -> list[Array]:
        """Run a batch, whose length must be one of `edges`, and return its vectors, [rows, dim]."""
        rows, length = batch.shape
        if tuple(outputs) != self.outputs:
            raise EngineError(f"a TensorRT engine gives {', '.join(self.outputs)} only, not {', '.join(outputs)}")
        if length not in self._most:
            raise EngineError(f"the TensorRT engine runs texts padded to {self.edges} tokens, not to {length}")
        if not 1 <= rows <= self._most[length]:
            raise EngineError(
                f"the TensorRT engine runs 1 to {self._most[length]} texts of {length} tokens, not {rows}"
            )
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
            return self._free.pop()


def _check_devices(devices: Sequence[int]) -> None:
    count = cuda.device_count()
    if not devices or len(set(devices)) < len(devices) or not all(0 <= device < count for device in devices):
        raise EngineError(f"devices must be different GPUs among 0 to {count - 1}, got {list(devices)}")


def _owned_slot(made: ExitStack, loaded: LoadedEngine, profiles: Sequence[Profile], pooler: Pooler | None) -> Slot:
    slot = Slot(loaded, profiles, pooler)
    made.callback(slot.close)
    return slot


def _close_in(pid: int, resources: ExitStack) -> None:
    if os.getpid() == pid:
        resources.close()
