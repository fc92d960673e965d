"""TensorRT engines and backends on the double of a GPU, and the vectors that they should return."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

from sbert_infer.artifact.manifest import SENTENCE, TOKENS
from sbert_infer.artifact.plan_file import open_plan
from sbert_infer.backends.base import Batch, Packing
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.backend import TensorRTBackend
from sbert_infer.backends.tensorrt.build import BuiltEngine
from sbert_infer.backends.tensorrt.loaded_engine import Interface, LoadedEngine
from sbert_infer.backends.tensorrt.tensors import INPUTS, input_shape
from sbert_infer.backends.tensorrt.versions import TensorRT
from sbert_infer.text.packing import Packer
from sbert_infer.types import Shape
from tests.doubles.cuda import REAL_CUDA, DoubleRuntime, Machine, double_driver
from tests.doubles.tensorrt import MAGIC, double_tensorrt
from tests.models.tensorrt_models import DIM, VOCABULARY, small_encoder

SHAPES = (Shape(1, 8, 2), Shape(6, 8, 2), Shape(3, 16, 4), Shape(1, 40, 10))
PACKER = Packer(SHAPES, hidden=DIM)
MODEL = small_encoder(np.float32)
HALF_MODEL = small_encoder()
INTERFACE = Interface(INPUTS, SENTENCE, DIM)
TOKEN_INTERFACE = Interface(INPUTS, TOKENS, DIM, "HALF")
OUT_OF_MEMORY = REAL_CUDA.cudaError_t.cudaErrorMemoryAllocation
CAPTURE_FAILED = REAL_CUDA.cudaError_t.cudaErrorStreamCaptureInvalidated


class Lab:
    """A machine with doubles of GPUs, and TensorRT engines and backends on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
        self.machine = Machine(gpus)
        runtime, driver = DoubleRuntime(self.machine), double_driver(self.machine)
        monkeypatch.setattr(cuda, "_runtime", lambda: runtime)
        monkeypatch.setattr(cuda, "_load_driver", lambda: driver)
        self.opened: list[TensorRTBackend | LoadedEngine | Bench] = []
        self.built = 0  # TensorRT engines
        self._monkeypatch = monkeypatch

    def install(self, plan: Path, *, rtx: bool = False) -> None:
        """Let `Engine` find doubles of GPUs and of TensorRT for this plan, and build with them.

        What it builds runs the plan's own model, on onnxruntime.
        """

        def build(trt: TensorRT, model: bytes, shapes: Sequence[Shape], **how: object) -> BuiltEngine:
            self.built += 1
            return BuiltEngine(MAGIC + model, b"")

        trt = double_tensorrt(self.machine, open_plan(plan).rows.shapes, rtx=rtx)
        self._monkeypatch.setattr("sbert_infer.backends.select.installed", lambda: [trt])
        self._monkeypatch.setattr("sbert_infer.backends.tensorrt.build_cache.build_engine", build)

    def load(
        self,
        *,
        rtx: bool = False,
        model: bytes = MODEL,
        engine: bytes | None = None,
        built: tuple[Shape, ...] = SHAPES,
        interface: Interface = INTERFACE,
        cuda_graphs: bool = True,
    ) -> LoadedEngine:
        """Load a TensorRT engine `built` for some shapes, and check it against `SHAPES`."""
        trt = double_tensorrt(self.machine, built, rtx=rtx)
        loaded = LoadedEngine(trt, engine or MAGIC + model, SHAPES, interface, 0, cuda_graphs)
        self.opened.append(loaded)
        return loaded

    def bench(self, loaded: LoadedEngine, index: int = 1) -> Bench:
        """Prepare a loaded engine to run the shape of this index."""
        bench = Bench(loaded, index)
        self.opened.append(bench)
        return bench

    def open(self, *, rtx: bool = False, engine: bytes | None = None, **options: Any) -> TensorRTBackend:
        """Open a backend; with a pooler, its engine gives token vectors, in FP16."""
        model, interface = (HALF_MODEL, TOKEN_INTERFACE) if options.get("pooler") else (MODEL, INTERFACE)
        trt = double_tensorrt(self.machine, SHAPES, rtx=rtx, output=interface.output)
        serialized = MAGIC + model if engine is None else engine
        backend = TensorRTBackend(trt, serialized, **{"packer": PACKER, "interface": interface, **options})
        self.opened.append(backend)
        return backend

    def close(self) -> None:
        """Close what is open, and check that nothing is left on the machine."""
        while self.opened:
            self.opened.pop().close()
        assert not +self.machine.alive, "something was not freed"
        assert self.machine.broken == []


class Bench:
    """A context of a loaded engine for one shape, with a stream and buffers, as a slot has them."""

    def __init__(self, loaded: LoadedEngine, index: int) -> None:
        self.loaded, self.shape = loaded, SHAPES[index]
        self.sizes = {name: input_shape(name, self.shape) for name in loaded.interface.inputs}
        self.stream = cuda.Stream()
        self.activations = cuda.DeviceBuffer(loaded.activation_bytes)
        self.sent = {name: cuda.HostBuffer(np.int64, rows * last) for name, (rows, last) in self.sizes.items()}
        self.inputs = {name: cuda.DeviceBuffer(8 * rows * last) for name, (rows, last) in self.sizes.items()}
        count = self.shape.rows * self.shape.segments * DIM
        self.output, self.received = cuda.DeviceBuffer(4 * count), cuda.HostBuffer(np.float32, count)
        with loaded.preparing:
            self.context = loaded.make_context()
            self.prepare(index)

    def prepare(self, index: int) -> None:
        attempt, context = self.loaded.attempt, self.context
        attempt(context.set_optimization_profile_async, index, int(self.stream))
        self.stream.synchronize()
        for name, size in self.sizes.items():
            attempt(context.set_input_shape, name, size)
            attempt(context.set_tensor_address, name, self.inputs[name].pointer)
        attempt(context.set_tensor_address, SENTENCE, self.output.pointer)
        assert attempt(context.infer_shapes) == []
        context.set_device_memory(self.activations.pointer, self.activations.size)

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Return the vectors of the batch's texts."""
        packing = batch.packing
        assert packing is not None
        arrays = (batch.ids, packing.segments, packing.positions, packing.starts, packing.ends)
        for name, array in zip(INPUTS, arrays, strict=True):
            self.sent[name].array[:] = array.ravel()
            cuda.copy_to_device(self.inputs[name], self.sent[name], array.nbytes, self.stream)
        self.enqueue()
        cuda.copy_to_host(self.received, self.output, self.output.size, self.stream)
        self.stream.synchronize()
        return np.array(self.received.array.reshape(-1, DIM)[packing.texts])

    def enqueue(self) -> None:
        self.loaded.attempt(self.context.execute_async_v3, int(self.stream))

    def close(self) -> None:
        self.stream.synchronize()
        self.context = None
        for host in (*self.sent.values(), self.received):
            host.close()
        for device in (*self.inputs.values(), self.output, self.activations):
            device.close()
        self.stream.close()


def packed(shape: Shape, seed: int = 0) -> Batch:
    """Return rows of `shape` with texts of different lengths, and gaps here and there."""
    random = np.random.default_rng([seed, shape.rows, shape.length])
    ids, segments, positions = np.zeros((3, shape.rows, shape.length), np.int64)
    starts, ends = np.zeros((2, shape.rows, shape.segments), np.int64)
    for row in range(shape.rows):
        cuts = np.sort(random.integers(0, shape.length + 1, shape.segments))
        for number, (start, end) in enumerate(zip(np.append(0, cuts), cuts, strict=False)):
            if start < end:
                ids[row, start:end] = random.integers(1, VOCABULARY, end - start)
                segments[row, start:end] = number + 1
                positions[row, start:end] = np.arange(end - start)
                starts[row, number], ends[row, number] = start, end
    texts = np.flatnonzero(ends > starts)
    return Batch(ids, (segments > 0).astype(np.int64), packing=Packing(segments, positions, starts, ends, texts))


def expected(batch: Batch, model: bytes = MODEL) -> npt.NDArray[np.float32]:
    """Return the vectors of a batch's texts, each of which runs alone, on onnxruntime."""
    packing = batch.packing
    assert packing is not None
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = {tensor.name for tensor in session.get_inputs()}
    vectors = []
    for row, segment in zip(*np.divmod(packing.texts, packing.starts.shape[1]), strict=True):
        start, end = packing.starts[row, segment], packing.ends[row, segment]
        ids, length = batch.ids[row : row + 1, start:end], end - start
        feed = {
            "input_ids": ids,
            "segment_ids": np.ones_like(ids),
            "position_ids": np.arange(length)[None],
            "starts": np.array([[0]]),
            "ends": np.array([[length]]),
        }
        vectors.append(session.run([SENTENCE], {name: feed[name] for name in names})[0][0, 0])
    return np.stack(vectors)


def run_packed(backend: TensorRTBackend, batch: Batch) -> npt.NDArray[np.float32]:
    """Return the vectors of a batch's texts."""
    (found,) = backend.run(batch, (SENTENCE,))
    return found


def check(backend: TensorRTBackend, shape: Shape = SHAPES[1], seed: int = 0) -> None:
    """Run texts in this shape, and compare their vectors with those that they have alone."""
    batch = packed(shape, seed)
    np.testing.assert_allclose(run_packed(backend, batch), expected(batch), atol=2e-6)
