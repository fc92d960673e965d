"""Slots, each of which runs one batch at a time on a GPU, with a stream and buffers of its own.

NVIDIA's rule for CUDA graphs is one context per captured graph, which is never changed afterwards,
and activation memory that the contexts share. So a slot has a context for each shape (there is a
handful), all of them made and run once before it is used. The contexts of a slot run one after
another on one stream, and share one block of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sbert_infer.backends.base import Array, Batch, Packing
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.loaded_engine import LoadedEngine
from sbert_infer.backends.tensorrt.tensors import SPANS, input_shape, packed_inputs
from sbert_infer.errors import EngineError, warn
from sbert_infer.types import Shape

Ids = npt.NDArray[np.int64]


class PooledMemory(NamedTuple):
    """Addresses on a GPU of what is pooled, and of the result."""

    tokens: int  # [tokens, dim] in 16 bits
    starts: int  # [spans] int64: offset of the first token of each span
    ends: int  # [spans] int64: offset after its last token
    out: int  # [spans, dim] FP32


class Pooler(Protocol):
    """Pools token vectors on the GPU, for a TensorRT engine that returns those."""

    def __call__(
        self, memory: PooledMemory, shape: tuple[int, int, int], longest: int, device: int, stream: int
    ) -> None:
        """Queue the pooling on `stream`; `shape` is (tokens, spans, dim), `longest` in tokens."""
        ...


class Slot:
    """Runs one batch at a time. With several slots on a GPU, one copies while another computes."""

    def __init__(self, engine: LoadedEngine, shapes: Sequence[Shape], pooler: Pooler | None) -> None:
        self.engine, self._pooler = engine, pooler
        self._contexts: dict[tuple[int, int], _FixedContext] = {}  # by rows and length
        cuda.set_device(engine.device)
        with ExitStack() as made:  # frees what was made so far if memory runs out
            made.callback(self._contexts.clear)
            self._allocate(made, shapes)
            for profile, shape in enumerate(shapes):
                self._make_ready(made, profile, shape)
            self._resources = made.pop_all()

    def _allocate(self, made: ExitStack, shapes: Sequence[Shape]) -> None:
        """Allocate buffers for the largest shape, whose addresses all contexts and graphs use."""
        dim = self.engine.interface.dim
        tokens = max(shape.tokens for shape in shapes)
        texts = max(shape.rows * shape.segments for shape in shapes)
        counts = {name: texts if name in SPANS else tokens for name in self.engine.interface.inputs}
        self.stream = _owned(made, cuda.Stream())
        self.activations = _owned(made, cuda.DeviceBuffer(self.engine.activation_bytes))
        self._sent = {name: _owned(made, cuda.HostBuffer(np.int64, count)) for name, count in counts.items()}
        self.inputs = {name: _owned(made, cuda.DeviceBuffer(8 * count)) for name, count in counts.items()}
        self._vectors = _owned(made, cuda.DeviceBuffer(4 * texts * dim))
        self._received = _owned(made, cuda.HostBuffer(np.float32, texts * dim))
        self.output = _owned(made, cuda.DeviceBuffer(2 * tokens * dim)) if self._pooler else self._vectors

    def _make_ready(self, made: ExitStack, profile: int, shape: Shape) -> None:
        """Make the context of a shape, run it once, and capture its CUDA graph."""
        context = _owned(made, _FixedContext(self, profile, shape))
        self._contexts[shape.rows, shape.length] = context
        self._run(context, _one_token(shape))
        context.capture()

    def run(self, batch: Batch) -> Array:
        """Return the vectors of a packed batch's texts, [texts, dim]."""
        cuda.set_device(self.engine.device)
        return self._run(self._contexts[batch.shape], batch)

    def close(self) -> None:
        """Free everything: graphs and contexts in reverse order, then the memory that they use."""
        cuda.set_device(self.engine.device)
        with suppress(EngineError):
            self.stream.synchronize()
        self._resources.close()

    def _run(self, context: _FixedContext, batch: Batch) -> Array:
        packing = batch.packing
        assert packing is not None  # noqa: S101  # the backend has checked it
        inputs = packed_inputs(batch)
        if self._pooler is None:
            self._send(inputs)
            context.enqueue()
            return self._receive(int(packing.texts.max()) + 1)[packing.texts]
        starts, ends = _spans(batch, packing)
        self._send({**inputs, "starts": starts, "ends": ends})
        context.enqueue()
        shape, longest = (batch.ids.size, len(packing.texts), self.engine.interface.dim), int((ends - starts).max())
        buffers = (self.output, self.inputs["starts"], self.inputs["ends"], self._vectors)
        memory = PooledMemory(*(buffer.pointer for buffer in buffers))
        self._pooler(memory, shape, longest, self.engine.device, int(self.stream))
        return np.array(self._receive(len(packing.texts)))

    def _send(self, arrays: dict[str, Ids]) -> None:
        for name, buffer in self._sent.items():
            array = arrays[name].ravel()
            buffer.array[: len(array)] = array
            cuda.copy_to_device(self.inputs[name], buffer, array.nbytes, self.stream)

    def _receive(self, vectors: int) -> Array:
        """Copy vectors to the host and wait. Returns a buffer that the next batch overwrites."""
        found: Array = self._received.array[: vectors * self.engine.interface.dim].reshape(vectors, -1)
        cuda.copy_to_host(self._received, self._vectors, found.nbytes, self.stream)
        self.stream.synchronize()
        return found


def _spans(batch: Batch, packing: Packing) -> tuple[Ids, Ids]:
    """Return what the kernel pools of each text, as tokens of all rows; a graph takes columns."""
    first = packing.texts // packing.starts.shape[1] * batch.shape[1]  # token of the text's row
    return packing.starts.ravel()[packing.texts] + first, packing.ends.ravel()[packing.texts] + first


def _one_token(shape: Shape) -> Batch:
    """Return a batch with a text of one token."""
    ids, segments, positions = np.zeros((3, shape.rows, shape.length), np.int64)
    starts, ends = np.zeros((2, shape.rows, shape.segments), np.int64)
    segments[0, 0] = ends[0, 0] = 1
    return Batch(ids, segments, packing=Packing(segments, positions, starts, ends, np.zeros(1, np.int64)))


class _FixedContext:
    """An execution context for one shape, never changed, so that its CUDA graph stays valid."""

    def __init__(self, slot: Slot, profile: int, shape: Shape) -> None:
        self._shape = shape
        self._engine, self._stream = slot.engine, slot.stream
        self._graph: cuda.Graph | None = None
        with slot.engine.preparing:
            self._context = slot.engine.make_context()
            self._prepare(slot, profile)

    def _prepare(self, slot: Slot, profile: int) -> None:
        context, attempt, interface = self._context, self._engine.attempt, self._engine.interface
        attempt(context.set_optimization_profile_async, profile, int(self._stream))
        self._stream.synchronize()  # the switch may copy data, which must arrive before shapes are set
        for name in interface.inputs:
            attempt(context.set_input_shape, name, input_shape(name, self._shape))
            attempt(context.set_tensor_address, name, slot.inputs[name].pointer)
        attempt(context.set_tensor_address, interface.output, slot.output.pointer)
        self._engine.require(attempt(context.infer_shapes) == [], "infer_shapes")
        context.set_device_memory(slot.activations.pointer, slot.activations.size)

    def enqueue(self) -> None:
        """Queue the model's work on the stream."""
        if self._graph is not None:
            self._graph.launch(self._stream)
        else:
            self._execute()

    def capture(self) -> None:
        """Capture a CUDA graph for later runs, after the first run has prepared the context."""
        if not self._engine.captures:
            return
        try:
            self._graph = cuda.Graph(self._stream, self._execute)
        except EngineError as error:
            self._engine.captures = False  # not tried again, with another warning, for every shape
            what = f"{self._shape.rows} x {self._shape.length} tokens"
            warn(f"no CUDA graph of {what}, nor of further shapes: {error}")

    def close(self) -> None:
        """Free the graph, then the context."""
        if self._graph is not None:
            self._graph.close()
        self._graph = self._context = None

    def _execute(self) -> None:
        self._engine.attempt(self._context.execute_async_v3, int(self._stream))


class _Closable(Protocol):
    def close(self) -> None: ...


_T = TypeVar("_T", bound=_Closable)


def _owned(stack: ExitStack, resource: _T) -> _T:
    stack.callback(resource.close)
    return resource
