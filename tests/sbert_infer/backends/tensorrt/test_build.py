"""Real TensorRT engines built by the real TensorRT-RTX, which needs no GPU for that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sbert_infer
from sbert_infer import EngineError
from sbert_infer.artifact.manifest import SENTENCE, TOKENS
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.build import build_engine, targets
from sbert_infer.backends.tensorrt.tensors import INPUTS
from sbert_infer.backends.tensorrt.versions import TensorRT, load
from sbert_infer.types import Shape
from tests.models.tensorrt_models import BF16, small_encoder

tensorrt_rtx: Any = pytest.importorskip("tensorrt_rtx")

SHAPES = (Shape(1, 16, 4), Shape(8, 16, 4), Shape(2, 64, 16))
PACKAGE = Path(sbert_infer.__file__).parent
SOURCES = sorted((PACKAGE / "backends" / "tensorrt").glob("*.py"))


@pytest.fixture(scope="module")
def rtx() -> TensorRT:
    return load("tensorrt_rtx")


# TensorRT's own objects are not recorded: they must be freed when a build ends, not by the garbage
# collector.
KEPT = (int, str, bytes, tuple, tensorrt_rtx.ComputeCapability, tensorrt_rtx.BuilderFlag)


class Recorder:
    """Wraps a real TensorRT object and records calls and assignments, with real results."""

    def __init__(self, real: Any, calls: list[tuple[Any, ...]]) -> None:
        object.__setattr__(self, "_real", real)
        object.__setattr__(self, "_calls", calls)

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if not callable(real) or isinstance(real, type):
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            plain = [arg._real if isinstance(arg, Recorder) else arg for arg in args]
            self._calls.append((name, *(arg for arg in plain if type(arg) in KEPT)))
            result = real(*plain, **kwargs)
            wraps = ("create_builder_config", "create_optimization_profile")
            return Recorder(result, self._calls) if name in wraps else result

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        self._calls.append((name,))
        setattr(self._real, name, value)


def recorded(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch, **differences: Any) -> tuple[TensorRT, list[Any]]:
    """Return TensorRT-RTX with a recording builder and the `differences` of another TensorRT."""
    calls: list[Any] = []
    module = SimpleNamespace(**{name: getattr(rtx.module, name) for name in dir(rtx.module) if name[0] != "_"})
    module.Builder = lambda log: Recorder(rtx.module.Builder(log), calls)
    fields = {name: getattr(rtx, name) for name in TensorRT.__dataclass_fields__}
    return TensorRT(**{**fields, "module": module, **differences}), calls


# --------------------------------------------------------------------------------------------------
# Engines


def test_engines_for_gpus_that_are_not_there(rtx: TensorRT) -> None:
    built = [build_engine(rtx, small_encoder(), SHAPES, target=target) for target in ("sm75", "sm89", "sm120")]
    for each in built:
        assert len(each.engine) > len(small_encoder())
        assert all(name.encode() in each.engine for name in (*INPUTS, SENTENCE))
        assert each.timing_cache == b""
    assert len({each.engine for each in built}) == 3


def test_a_model_without_positions(rtx: TensorRT) -> None:
    engine = build_engine(rtx, small_encoder(positions=False), SHAPES, target="sm89").engine
    assert b"position_ids" not in engine


@pytest.mark.parametrize("output", [SENTENCE, TOKENS])
def test_one_output_is_kept_and_every_input(rtx: TensorRT, output: str) -> None:
    """The engine of token vectors has no use for `starts` and `ends`, but keeps them as inputs."""
    engine = build_engine(rtx, small_encoder(), SHAPES, target="sm89", output=output).engine
    assert [name for name in (SENTENCE, TOKENS) if name.encode() in engine] == [output]
    assert all(name.encode() in engine for name in INPUTS)


def test_bf16(rtx: TensorRT) -> None:
    model = small_encoder(BF16)
    assert build_engine(rtx, model, SHAPES, target="sm80", precision="bf16").engine
    with pytest.raises(EngineError, match=r"^sm75 has no BF16, which GPUs have from sm80 on: export the model to FP16"):
        build_engine(rtx, model, SHAPES, target="sm75", precision="bf16")


def test_the_builder_is_told_what_the_runtime_relies_on(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    trt, calls = recorded(rtx, monkeypatch)
    build_engine(trt, small_encoder(), SHAPES[1:], target="sm86")
    strongly_typed = 1 << int(rtx.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert ("create_network", strongly_typed) in calls
    assert ("set_compute_capability", rtx.module.ComputeCapability.SM86, 0) in calls
    assert ("set_flag", rtx.module.BuilderFlag.REQUIRE_USER_ALLOCATION) in calls
    shapes = [call for call in calls if call[0] == "set_shape"]
    assert sorted(shapes) == sorted(
        ("set_shape", name, *[size] * 3)
        for row, spans in (((8, 16), (8, 4)), ((2, 64), (2, 16)))
        for name, size in {**dict.fromkeys(INPUTS, row), "starts": spans, "ends": spans}.items()
    )
    names = [call[0] for call in calls]
    assert names.count("add_optimization_profile") == 2
    assert "set_timing_cache" not in names  # deprecated there, so a call would warn


def test_memory_and_verbosity_have_their_defaults(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit makes fused layers fail to build, and more verbosity costs latency."""
    trt, calls = recorded(rtx, monkeypatch)
    build_engine(trt, small_encoder(), SHAPES, target="sm86")
    assert {call[0] for call in calls}.isdisjoint({"set_memory_pool_limit", "profiling_verbosity"})


@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops:DeprecationWarning")
def test_a_timing_cache_is_kept_and_taken_again(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls for TensorRT itself, made on the no-ops that TensorRT-RTX still has."""
    trt, calls = recorded(rtx, monkeypatch, timing_cache=True)
    first = build_engine(trt, small_encoder(), SHAPES, target="sm89")
    assert first.timing_cache
    again = build_engine(trt, small_encoder(), SHAPES, target="sm89", timing_cache=first.timing_cache)
    assert again.engine
    assert [call[1] for call in calls if call[0] == "create_timing_cache"] == [b"", first.timing_cache]


@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops:DeprecationWarning")
def test_a_timing_cache_that_can_not_be_read_is_left_out(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    trt, calls = recorded(rtx, monkeypatch, timing_cache=True)
    real = rtx.module.IBuilderConfig.create_timing_cache

    def create(config: Any, content: bytes) -> Any:
        return None if content else real(config, content)

    monkeypatch.setattr(rtx.module.IBuilderConfig, "create_timing_cache", create)
    assert build_engine(trt, small_encoder(), SHAPES, target="sm89", timing_cache=b"damaged").engine
    assert [call[1] for call in calls if call[0] == "create_timing_cache"] == [b"damaged", b""]


def test_progress_is_reported(rtx: TensorRT) -> None:
    seen: list[tuple[str, int, int]] = []
    build_engine(rtx, small_encoder(), SHAPES, target="sm89", progress=lambda *step: seen.append(step))
    assert seen[0][1] == 0
    assert all(0 <= done <= steps for _, done, steps in seen)
    assert any(done == steps for _, done, steps in seen)


# --------------------------------------------------------------------------------------------------
# Cancelling


def test_a_build_can_be_cancelled(rtx: TensorRT) -> None:
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 3

    with pytest.raises(EngineError, match=r"^the build was cancelled$"):
        build_engine(rtx, small_encoder(), SHAPES, target="sm89", cancelled=cancelled)


def test_what_progress_raises_ends_the_build(rtx: TensorRT) -> None:
    def progress(phase: str, done: int, steps: int) -> None:
        raise ZeroDivisionError(phase)

    with pytest.raises(ZeroDivisionError):
        build_engine(rtx, small_encoder(), SHAPES, target="sm89", progress=progress)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_control_c_stops_a_build(rtx: TensorRT) -> None:
    """The build ends after a few of its many steps, and its thread ends with it."""
    reports: list[int] = []

    def progress(phase: str, done: int, steps: int) -> None:
        reports.append(threading.get_ident())
        if len(reports) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05 if len(reports) >= 5 else 0)

    with pytest.raises(KeyboardInterrupt):
        build_engine(rtx, small_encoder(), SHAPES, target="sm89", progress=progress)
    assert threading.get_ident() not in reports
    whole: list[str] = []
    build_engine(rtx, small_encoder(), SHAPES, target="sm89", progress=lambda phase, *_: whole.append(phase))
    assert len(reports) < len(whole) / 2
    for thread in threading.enumerate():
        if thread.name == "sbert-infer-build":
            thread.join(timeout=10)
            assert not thread.is_alive()


# --------------------------------------------------------------------------------------------------
# Errors


def test_foreign_operators_are_named(rtx: TensorRT) -> None:
    model = small_encoder(foreign=("Frobnicate", "Defrobnicate"))
    with pytest.raises(EngineError, match=r"does not take the operators Frobnicate .*, Defrobnicate ") as caught:
        build_engine(rtx, model, SHAPES, target="sm89")
    assert "\n" not in str(caught.value)


def test_a_model_that_is_none(rtx: TensorRT) -> None:
    with pytest.raises(EngineError, match=r"tensorrt_rtx [\d.]+ can't read the model"):
        build_engine(rtx, b"no model", SHAPES, target="sm89")


def test_targets(rtx: TensorRT) -> None:
    assert {"sm75", "sm80", "sm86", "sm89", "sm120"} <= set(targets(rtx))
    with pytest.raises(EngineError, match=r"tensorrt_rtx [\d.]+ builds for sm75, .*, not for sm20"):
        build_engine(rtx, small_encoder(), SHAPES, target="sm20")


def test_tensorrt_itself_has_no_targets(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    full, _ = recorded(rtx, monkeypatch, name="tensorrt", any_target=False)
    assert targets(full) == []
    with pytest.raises(EngineError, match="tensorrt builds for this machine's GPU only, not for sm89"):
        build_engine(full, small_encoder(), SHAPES, target="sm89")


def test_this_machines_gpu(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "driver_problem", lambda: "there is no NVIDIA driver")
    with pytest.raises(EngineError, match="for this machine's GPU: there is no NVIDIA driver"):
        build_engine(rtx, small_encoder(), SHAPES)
    monkeypatch.setattr(cuda, "driver_problem", lambda: None)
    monkeypatch.setattr(cuda, "compute_capability", lambda device: {0: "sm90", 1: "sm80"}[device])
    with pytest.raises(EngineError, match="not for sm90"):
        build_engine(rtx, small_encoder(), SHAPES)
    trt, calls = recorded(rtx, monkeypatch)
    build_engine(trt, small_encoder(), SHAPES, device=1)
    assert ("set_compute_capability", rtx.module.ComputeCapability.SM80, 0) in calls


def test_tensorrt_builds_on_the_gpu_that_was_asked_for(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is set in the thread that builds, because each thread has its own current GPU."""
    full, calls = recorded(rtx, monkeypatch, any_target=False)
    chosen: list[tuple[int, int]] = []
    monkeypatch.setattr(cuda, "driver_problem", lambda: None)
    monkeypatch.setattr(cuda, "set_device", lambda device: chosen.append((device, len(calls))))
    build_engine(full, small_encoder(), SHAPES, device=1)
    assert chosen == [(1, 0)]


def test_a_shape_that_can_not_be(rtx: TensorRT) -> None:
    with pytest.raises(EngineError, match=r"refuses Shape\(rows=-1, length=16, segments=4\): "):
        build_engine(rtx, small_encoder(), [Shape(-1, 16, 4)], target="sm89")


def test_building_in_a_fresh_process_leaves_nothing_behind() -> None:
    """Objects are freed in an order that does not crash when the interpreter exits."""
    code = """
        from sbert_infer.types import Shape
        from sbert_infer.backends.tensorrt.versions import load
        from sbert_infer.backends.tensorrt.build import build_engine
        from tests.models.tensorrt_models import small_encoder
        engine = build_engine(load("tensorrt_rtx"), small_encoder(), [Shape(2, 16, 4)], target="sm89").engine
        print(len(engine) > 0)
    """
    root = PACKAGE.parent
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=root, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
