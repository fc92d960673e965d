"""Loading a TensorRT engine, and keeping what TensorRT-RTX compiles, on a double of a GPU.

No GPU, CUDA or TensorRT is used here (see tests/doubles/tensorrt.py), so these tests say nothing
about speed or FP16.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbert_infer import EngineError
from sbert_infer.artifact.manifest import SENTENCE, TOKENS
from sbert_infer.backends.tensorrt.loaded_engine import Interface, LoadError
from sbert_infer.backends.tensorrt.tensors import INPUTS
from sbert_infer.types import Shape
from tests.models.tensorrt_models import DIM, small_encoder

pytest.importorskip("tensorrt_rtx")
pytest.importorskip("cuda.bindings.runtime")

from tests.doubles.tensorrt import REAL_TRT
from tests.doubles.tensorrt_lab import SHAPES, Lab, expected, packed

OTHER_SHAPES = (*SHAPES[:-1], Shape(1, 40, 9))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SBERT_INFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("rtx", [False, True], ids=["tensorrt", "rtx"])
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_vectors_of_every_shape(lab: Callable[..., Lab], rtx: bool, index: int) -> None:
    there = lab()
    bench = there.bench(there.load(rtx=rtx), index)
    for seed in range(2):
        batch = packed(SHAPES[index], seed)
        np.testing.assert_allclose(bench.run(batch), expected(batch), atol=2e-6)


# --------------------------------------------------------------------------------------------------
# What is checked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"built": SHAPES[:2]}, r"built for input_ids of \(1, 8\), \(6, 8\), not of \(1, 8\), \(6, 8\), \(3, 16\), "),
        ({"built": SHAPES[::-1]}, r"built for input_ids of \(1, 40\), .*, not of \(1, 8\), .*: export the model again"),
        ({"built": OTHER_SHAPES}, r"built for starts of .*\(1, 9\), not of .*\(1, 10\): export the model again"),
        ({"interface": Interface(INPUTS, SENTENCE, 384)}, "vectors have 16 dimensions, not 384"),
        ({"interface": Interface(INPUTS, SENTENCE, DIM, "HALF")}, "vectors are FLOAT, not HALF"),
        ({"interface": Interface(INPUTS, TOKENS, DIM)}, "tensors are .*: export the model again"),
        ({"model": small_encoder(np.float32, positions=False)}, "tensors are .*: export the model again"),
        ({"engine": b"of another version"}, r"tensorrt 0\.0 can't load the engine on cuda:0: Serialization assertion"),
    ],
)
def test_an_engine_that_is_not_the_one(lab: Callable[..., Lab], options: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        lab().load(**options)


def test_an_engine_with_a_range_of_shapes(lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch) -> None:
    def shapes(engine: Any, name: str, profile_index: int) -> list[Any]:
        return [REAL_TRT.Dims([rows, 8]) for rows in (1, 4, 6)]

    monkeypatch.setattr("tests.doubles.tensorrt.DoubleEngine.get_tensor_profile_shape", shapes)
    with pytest.raises(LoadError, match=r"built for input_ids of \(1, 8\) to \(4, 8\) to \(6, 8\), .*, not of "):
        lab().load()


def test_a_model_without_positions(lab: Callable[..., Lab]) -> None:
    inputs = tuple(name for name in INPUTS if name != "position_ids")
    model = small_encoder(np.float32, positions=False)
    assert lab().load(model=model, interface=Interface(inputs, SENTENCE, DIM)).activation_bytes


# --------------------------------------------------------------------------------------------------
# Calls that fail


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("create_execution_context", "create_execution_context failed: out of memory"),
        ("set_optimization_profile_async", "set_optimization_profile_async failed: there is no profile 1"),
        ("infer_shapes", "infer_shapes failed: shapes contradict each other"),
        ("execute_async_v3", "execute_async_v3 failed: the kernel fell over"),
    ],
)
def test_calls_that_return_false_or_none_or_raise(lab: Callable[..., Lab], call: str, message: str) -> None:
    there = lab()
    loaded = there.load()
    there.machine.failures[call] = [1]
    with pytest.raises(EngineError, match=f"^tensorrt: {re.escape(message)}$"):
        there.bench(loaded).enqueue()
    there.machine.alive.clear()  # what the unfinished bench had made


def test_a_runtime_that_does_not_start(lab: Callable[..., Lab]) -> None:
    there = lab()
    there.machine.failures["Runtime"] = [1]
    with pytest.raises(EngineError, match=r"^tensorrt 0\.0 can't start: .*nullptr"):
        there.load()


def test_an_input_is_named(lab: Callable[..., Lab]) -> None:
    there = lab()
    bench = there.bench(there.load())
    with pytest.raises(EngineError, match=r"set_input_shape\(starts\) failed: starts \(6, 3\) is outside"):
        bench.loaded.attempt(bench.context.set_input_shape, "starts", (6, 3))


# --------------------------------------------------------------------------------------------------
# TensorRT-RTX's runtime cache


def test_kernels_are_compiled_by_the_first_process_only(lab: Callable[..., Lab], folder: Path) -> None:
    there = lab()
    for count in (1, 1):  # a second engine finds what the first one kept when it was closed
        bench = there.bench(there.load(rtx=True))
        bench.run(packed(bench.shape))
        assert there.machine.compiled == count
        there.close()
    assert len(list(folder.rglob("*.kernels"))) == 1


def test_kernels_are_kept_before_the_engine_is_closed(lab: Callable[..., Lab]) -> None:
    there = lab()
    bench = there.bench(there.load(rtx=True))
    bench.run(packed(bench.shape))
    bench.loaded.save_kernels()
    other = there.bench(there.load(rtx=True))
    other.run(packed(other.shape))
    assert there.machine.compiled == 1


def test_each_engine_and_gpu_has_its_own(
    lab: Callable[..., Lab], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = lab()
    for name, model in (("A", small_encoder(np.float32)), ("B", small_encoder(np.float32)), ("A", small_encoder())):
        monkeypatch.setattr("sbert_infer.backends.tensorrt.cuda.device_name", lambda device, name=name: f"GPU {name}")
        there.load(rtx=True, model=model).close()
    assert len(list(folder.rglob("*.kernels"))) == 3


def test_kernels_of_another_driver_are_compiled_again(lab: Callable[..., Lab]) -> None:
    there = lab()
    for count, driver in enumerate(["driver 570", "driver 580", "driver 580"]):
        there.machine.driver = driver
        bench = there.bench(there.load(rtx=True))
        bench.run(packed(bench.shape))
        there.close()
        assert there.machine.compiled == min(count + 1, 2)


def test_damaged_kernels_are_compiled_again(
    lab: Callable[..., Lab], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = lab()
    for count in (1, 2):
        bench = there.bench(there.load(rtx=True))
        bench.run(packed(bench.shape))
        there.close()
        assert there.machine.compiled == count
        (file,) = folder.rglob("*.kernels")
        file.write_bytes(file.read_bytes()[:-1])
    assert "damaged" in caplog.text


def test_nothing_is_written_if_nothing_was_compiled(lab: Callable[..., Lab], folder: Path) -> None:
    there = lab()
    there.load(rtx=True).close()
    (file,) = folder.rglob("*.kernels")
    file.touch()
    before = file.stat()
    there.load(rtx=True).close()
    assert file.stat().st_ino == before.st_ino


@pytest.mark.parametrize("call", ["create_runtime_cache", "set_runtime_cache", "serialize"])
def test_without_a_cache_it_runs_all_the_same(
    lab: Callable[..., Lab], call: str, caplog: pytest.LogCaptureFixture
) -> None:
    there = lab()
    there.machine.failures[call] = [1]
    bench = there.bench(there.load(rtx=True))
    batch = packed(bench.shape)
    np.testing.assert_allclose(bench.run(batch), expected(batch), atol=2e-6)
    there.close()
    assert call == "serialize" or "runtime cache" in caplog.text


def test_a_folder_that_can_not_be_written(
    lab: Callable[..., Lab], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file where the folder should be")
    there = lab()
    bench = there.bench(there.load(rtx=True))
    bench.run(packed(bench.shape))
    there.close()
    assert "can't be written" in caplog.text


def test_what_rtx_is_told(lab: Callable[..., Lab]) -> None:
    for cuda_graphs in (True, False):
        there = lab()
        there.bench(there.load(rtx=True, cuda_graphs=cuda_graphs))
        (config,) = {call[1] for call in there.machine.calls if call[0] == "create_execution_context"}
        strategies = REAL_TRT.CudaGraphStrategy
        assert config.cuda_graph_strategy == (strategies.WHOLE_GRAPH_CAPTURE if cuda_graphs else strategies.DISABLED)
        kernels = REAL_TRT.DynamicShapesKernelSpecializationStrategy
        assert config.dynamic_shapes_kernel_specialization_strategy == kernels.EAGER
        there.close()


def test_everything_is_freed_in_nvidias_order(lab: Callable[..., Lab]) -> None:
    there = lab()
    there.bench(there.load(rtx=True))
    start = len(there.machine.calls)
    there.close()
    names = [name for name in there.machine.names()[start:] if name.startswith("~")]
    assert names == ["~IExecutionContext", "~IRuntimeCache", "~ICudaEngine"]
