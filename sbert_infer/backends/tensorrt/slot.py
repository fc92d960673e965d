"""Slots, each of which runs one batch at a time on a GPU, with a stream and buffers of its own.

NVIDIA's rule for CUDA graphs is one context per captured graph, which is never changed afterwards,
and activation memory that the contexts share. So a context is made when a shape first runs (there
are few shapes: the length and batch sizes of each profile). The contexts of a slot run one after
another on one stream, and share one block of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.profiles import Profile
from sbert_infer.backends.base import Array, Batch
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.loaded_engine import LoadedEngine
from sbert_infer.errors import EngineError, warn

Ids = npt.NDArray[np.int64]


class Pooler(Protocol):
    """Pools token vectors on the GPU, for a TensorRT engine that returns those."""

    def __call__(self, tokens: int, mask: int, out: int, shape: tuple[int, int, int], device: int, stream: int) -> None:
        """Queue the pooling on `stream`.

        The arguments are addresses of FP16 tokens of `shape` [batch, length, dim], an int64 mask
        [batch, length] and FP32 output [batch, dim].
        """
        ...


class Slot:
    """Runs one batch at a time. With two slots on a GPU, one copies while the other computes."""

    def __init__(self, engine: LoadedEngine, profiles: Sequence[Profile], pooler: Pooler | None) -> None:
        self.engine, self._pooler = engine, pooler
        self._profiles = {profile.length: (index, profile) for index, profile in enumerate(profiles)}
        self._contexts: dict[tuple[int, int], _FixedContext] = {}  # by (batch, length)
        cuda.set_device(engine.device)
        with ExitStack() as made:  # frees what was made so far if memory runs out
            self._allocate(made, profiles)
            self._resources = made.pop_all()

    def _allocate(self, made: ExitStack, profiles: Sequence[Profile]) -> None:
        """Allocate buffers for the largest shape, whose addresses all contexts and graphs use."""
        dim = self.engine.interface.dim
        texts = max(profile.max_batch for profile in profiles)
        tokens = max(profile.max_batch * profile.length for profile in profiles)
        counts = {name: 1 if name == "prompt_length" else tokens for name in self.engine.interface.inputs}
        self.stream = _owned(made, cuda.Stream())
        self.activations = _owned(made, cuda.DeviceBuffer(self.engine.activation_bytes))
        self._sent = {name: _owned(made, cuda.HostBuffer(np.int64, count)) for name, count in counts.items()}
        self.inputs = {name: _owned(made, cuda.DeviceBuffer(8 * count)) for name, count in counts.items()}
        self._vectors = _owned(made, cuda.DeviceBuffer(4 * texts * dim))
        self._received = _owned(made, cuda.HostBuffer(np.float32, texts * dim))
        self.output = _owned(made, cuda.DeviceBuffer(2 * tokens * dim)) if self._pooler else self._vectors

    def run(self, batch: Batch) -> Array:
        """Return the vectors of a batch, [rows, dim]."""
        cuda.set_device(self.engine.device)
        rows, length = batch.shape
        shaped = self._context(rows, length)
        self._send({"input_ids": batch.ids, "attention_mask": batch.mask}, batch.prompt_length, shaped.batch)
        shaped.enqueue()
        self._pool(shaped.batch, length)
        vectors = self._receive(rows)
        shaped.capture()
        return vectors

    def close(self) -> None:
        """Free everything: graphs and contexts in reverse order, then the memory that they use."""
        cuda.set_device(self.engine.device)
        with suppress(EngineError):
            self.stream.synchronize()
        self._contexts.clear()
        self._resources.close()

    def _context(self, rows: int, length: int) -> _FixedContext:
        """Return the context for the smallest batch size that holds these rows."""
        index, profile = self._profiles[length]
        batch = next(size for size in profile.batches if size >= rows)
        if (batch, length) not in self._contexts:
            self._contexts[batch, length] = _owned(self._resources, _FixedContext(self, index, batch, length))
        return self._contexts[batch, length]

    def _send(self, arrays: dict[str, Ids], prompt_length: int, batch: int) -> None:
        """Copy a batch to the GPU, filled up with rows of padding."""
        for name, array in arrays.items():
            rows, length = array.shape
            filled = self._sent[name].array[: batch * length].reshape(batch, length)
            filled[:rows] = array
            filled[rows:] = 0
            cuda.copy_to_device(self.inputs[name], self._sent[name], filled.nbytes, self.stream)
        if "prompt_length" in self.inputs:
            self._sent["prompt_length"].array[0] = prompt_length
            cuda.copy_to_device(self.inputs["prompt_length"], self._sent["prompt_length"], 8, self.stream)

    def _pool(self, batch: int, length: int) -> None:
        if self._pooler is not None:
            shape, device = (batch, length, self.engine.interface.dim), self.engine.device
            tokens, mask, out = self.output.pointer, self.inputs["attention_mask"].pointer, self._vectors.pointer
            self._pooler(tokens, mask, out, shape, device, int(self.stream))

    def _receive(self, rows: int) -> Array:
        """Copy the vectors to the host and wait. Returns a copy: the next batch uses the buffer."""
        found = self._received.array[: rows * self.engine.interface.dim].reshape(rows, -1)
        cuda.copy_to_host(self._received, self._vectors, found.nbytes, self.stream)
        self.stream.synchronize()
        return np.array(found, np.float32)


class _FixedContext:
    """An execution context for one shape, never changed, so that its CUDA graph stays valid."""

    def __init__(self, slot: Slot, profile: int, batch: int, length: int) -> None:
        self.batch, self._length = batch, length
        self._engine, self._stream = slot.engine, slot.stream
        self._graph: cuda.Graph | None = None
        self._tried_capture = False
        with slot.engine.preparing:
            self._context = slot.engine.make_context()
            self._prepare(slot, profile)

    def _prepare(self, slot: Slot, profile: int) -> None:
        context, require = self._context, self._engine.require
        switched = context.set_optimization_profile_async(profile, int(self._stream))
        require(switched, "set_optimization_profile_async")
        self._stream.synchronize()  # the switch may copy data, which must arrive before shapes are set
        for name in ("input_ids", "attention_mask"):
            require(context.set_input_shape(name, (self.batch, self._length)), f"set_input_shape({name})")
        addresses = {name: buffer.pointer for name, buffer in slot.inputs.items()}
        addresses[self._engine.interface.output] = slot.output.pointer
        for name, pointer in addresses.items():
            require(context.set_tensor_address(name, pointer), f"set_tensor_address({name})")
        try:
            missing = context.infer_shapes()
        except RuntimeError as error:
            raise EngineError(f"infer_shapes failed: {error}") from error
        require(missing == [], "infer_shapes")
        context.set_device_memory(slot.activations.pointer, slot.activations.size)

    def enqueue(self) -> None:
        """Queue the model's work on the stream."""
        if self._graph is not None:
            self._graph.launch(self._stream)
        else:
            self._execute()

    def capture(self) -> None:
        """Capture a CUDA graph for later runs, after the first run has prepared the context."""
        if self._tried_capture or not self._engine.captures:
            return
        self._tried_capture = True
        try:
            self._graph = cuda.Graph(self._stream, self._execute)
        except EngineError as error:
            self._engine.captures = False  # not tried again, with another warning, for every shape
            warn(f"no CUDA graph of {self.batch} x {self._length} tokens, nor of further shapes: {error}")

    def close(self) -> None:
        """Free the graph, then the context."""
        if self._graph is not None:
            self._graph.close()
        self._graph = self._context = None

    def _execute(self) -> None:
        self._engine.require(self._context.execute_async_v3(int(self._stream)), "execute_async_v3")


class _Closable(Protocol):
    def close(self) -> None: ...


_T = TypeVar("_T", bound=_Closable)


def _owned(stack: ExitStack, resource: _T) -> _T:
    stack.callback(resource.close)
    return resource
