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

import numpy as np
import pytest
from sbert_infer.artifact.profiles import Profile

import sbert_infer
from sbert_infer import EngineError
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.build import build_engine, check_half, targets
from sbert_infer.backends.tensorrt.versions import TensorRT, load
from tests.models.tensorrt_models import small_encoder

tensorrt_rtx: Any = pytest.importorskip("tensorrt_rtx")

PROFILES = (Profile(16, 4, 8), Profile(64, 1, 2))
PACKAGE = Path(sbert_infer.__file__).parent
SOURCES = sorted((PACKAGE / "backends" / "tensorrt").glob("*.py"))


@pytest.fixture(scope="module")
def rtx() -> TensorRT:
    return load("tensorrt_rtx")


def parsed(rtx: TensorRT, model: bytes) -> Any:
    """Return the network, with the objects that must live as long as it does."""
    log = rtx.log
    builder = rtx.module.Builder(log)
    network = builder.create_network(1 << int(rtx.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    assert rtx.module.OnnxParser(network, log).parse(model)
    return SimpleNamespace(network=network, builder=builder, log=log)


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
    built = [build_engine(rtx, small_encoder(), PROFILES, target=target) for target in ("sm75", "sm89", "sm120")]
    for each in built:
        assert len(each.engine) > len(small_encoder())
        assert all(name in each.engine for name in (b"input_ids", b"attention_mask", b"sentence_embedding"))
        assert each.timing_cache == b""
    assert len({each.engine for each in built}) == 3


def test_each_variant_builds(rtx: TensorRT) -> None:
    for model in (small_encoder(prompt_length=True), small_encoder(tokens=True)):
        assert build_engine(rtx, model, PROFILES, target="sm89").engine


def test_the_builder_is_told_what_the_runtime_relies_on(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    trt, calls = recorded(rtx, monkeypatch)
    build_engine(trt, small_encoder(), PROFILES, target="sm86")
    strongly_typed = 1 << int(rtx.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert ("create_network", strongly_typed) in calls
    assert ("set_compute_capability", rtx.module.ComputeCapability.SM86, 0) in calls
    assert ("set_flag", rtx.module.BuilderFlag.REQUIRE_USER_ALLOCATION) in calls
    shapes = [call for call in calls if call[0] == "set_shape"]
    assert shapes == [
        ("set_shape", "input_ids", (1, 16), (4, 16), (8, 16)),
        ("set_shape", "attention_mask", (1, 16), (4, 16), (8, 16)),
        ("set_shape", "input_ids", (1, 64), (1, 64), (2, 64)),
        ("set_shape", "attention_mask", (1, 64), (1, 64), (2, 64)),
    ]
    names = [call[0] for call in calls]
    assert names.count("add_optimization_profile") == 2
    assert "set_timing_cache" not in names  # deprecated there, so a call would warn


@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops:DeprecationWarning")
def test_a_timing_cache_is_kept_and_taken_again(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls for TensorRT itself, made on the no-ops that TensorRT-RTX still has."""
    trt, calls = recorded(rtx, monkeypatch, timing_cache=True)
    first = build_engine(trt, small_encoder(), PROFILES, target="sm89")
    assert first.timing_cache
    again = build_engine(trt, small_encoder(), PROFILES, target="sm89", timing_cache=first.timing_cache)
    assert again.engine
    assert [call[1] for call in calls if call[0] == "create_timing_cache"] == [b"", first.timing_cache]


def test_progress_is_reported(rtx: TensorRT) -> None:
    seen: list[tuple[str, int, int]] = []
    build_engine(rtx, small_encoder(), PROFILES, target="sm89", progress=lambda *step: seen.append(step))
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
        build_engine(rtx, small_encoder(), PROFILES, target="sm89", cancelled=cancelled)


def test_what_progress_raises_ends_the_build(rtx: TensorRT) -> None:
    def progress(phase: str, done: int, steps: int) -> None:
        raise ZeroDivisionError(phase)

    with pytest.raises(ZeroDivisionError):
        build_engine(rtx, small_encoder(), PROFILES, target="sm89", progress=progress)


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
        build_engine(rtx, small_encoder(), PROFILES, target="sm89", progress=progress)
    assert threading.get_ident() not in reports
    whole: list[str] = []
    build_engine(rtx, small_encoder(), PROFILES, target="sm89", progress=lambda phase, *_: whole.append(phase))
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
        build_engine(rtx, model, PROFILES, target="sm89")
    assert "\n" not in str(caught.value)


def test_a_model_that_is_none(rtx: TensorRT) -> None:
    with pytest.raises(EngineError, match=r"tensorrt_rtx [\d.]+ can't read the model"):
        build_engine(rtx, b"no model", PROFILES, target="sm89")


def test_products_in_fp32_are_named(rtx: TensorRT) -> None:
    with pytest.raises(EngineError, match=r"^1 of 6 matrix products are not in FP16: node_wide_product \(FLOAT\)$"):
        build_engine(rtx, small_encoder(wide=True), PROFILES, target="sm89")
    assert build_engine(rtx, small_encoder(wide=True), PROFILES, target="sm89", half=False).engine
    assert build_engine(rtx, small_encoder(outer=True), PROFILES, target="sm89").engine


def test_the_products_of_the_network_are_half(rtx: TensorRT) -> None:
    there = parsed(rtx, small_encoder())
    layers = [there.network.get_layer(index) for index in range(there.network.num_layers)]
    products = [layer for layer in layers if layer.type == rtx.module.LayerType.MATRIX_MULTIPLY]
    assert len(products) == 5
    assert {layer.get_output(0).dtype for layer in products} == {rtx.module.DataType.HALF}
    assert there.network.get_output(0).dtype == rtx.module.DataType.FLOAT
    check_half(rtx, there.network)
    with pytest.raises(EngineError, match="5 of 5 matrix products"):
        check_half(rtx, parsed(rtx, small_encoder(np.float32)).network)


def test_targets(rtx: TensorRT) -> None:
    assert {"sm75", "sm80", "sm86", "sm89", "sm120"} <= set(targets(rtx))
    with pytest.raises(EngineError, match=r"tensorrt_rtx [\d.]+ builds for sm75, .*, not for sm20"):
        build_engine(rtx, small_encoder(), PROFILES, target="sm20")


def test_tensorrt_itself_has_no_targets(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    full, _ = recorded(rtx, monkeypatch, name="tensorrt", any_target=False)
    assert targets(full) == []
    with pytest.raises(EngineError, match="tensorrt builds for this machine's GPU only, not for sm89"):
        build_engine(full, small_encoder(), PROFILES, target="sm89")


def test_this_machines_gpu(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "driver_problem", lambda: "there is no NVIDIA driver")
    with pytest.raises(EngineError, match="for this machine's GPU: there is no NVIDIA driver"):
        build_engine(rtx, small_encoder(), PROFILES)
    monkeypatch.setattr(cuda, "driver_problem", lambda: None)
    monkeypatch.setattr(cuda, "compute_capability", lambda device: {0: "sm90", 1: "sm80"}[device])
    with pytest.raises(EngineError, match="not for sm90"):
        build_engine(rtx, small_encoder(), PROFILES)
    trt, calls = recorded(rtx, monkeypatch)
    build_engine(trt, small_encoder(), PROFILES, device=1)
    assert ("set_compute_capability", rtx.module.ComputeCapability.SM80, 0) in calls


def test_tensorrt_builds_on_the_gpu_that_was_asked_for(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is set in the thread that builds, because each thread has its own current GPU."""
    full, calls = recorded(rtx, monkeypatch, any_target=False)
    chosen: list[tuple[int, int]] = []
    monkeypatch.setattr(cuda, "driver_problem", lambda: None)
    monkeypatch.setattr(cuda, "set_device", lambda device: chosen.append((device, len(calls))))
    build_engine(full, small_encoder(), PROFILES, device=1)
    assert chosen == [(1, 0)]


def test_a_profile_that_can_not_be(rtx: TensorRT) -> None:
    with pytest.raises((EngineError, ValueError)):
        build_engine(rtx, small_encoder(), [Profile(16, best_batch=8, max_batch=4)], target="sm89")


@pytest.mark.parametrize("name", ["input_ids", "attention_mask"])
def test_inputs_that_are_missing_or_foreign(rtx: TensorRT, name: str) -> None:
    import onnx

    model = onnx.load_from_string(small_encoder())
    for node in model.graph.node:
        node.input[:] = ["other" if value == name else value for value in node.input]
    next(value for value in model.graph.input if value.name == name).name = "other"
    with pytest.raises(EngineError, match=f"the model has no input {name}"):
        build_engine(rtx, model.SerializeToString(), PROFILES, target="sm89")


def test_building_in_a_fresh_process_leaves_nothing_behind() -> None:
    """Objects are freed in an order that does not crash when the interpreter exits."""
    code = """
        from sbert_infer.artifact.profiles import Profile
        from sbert_infer.backends.tensorrt.versions import load
        from sbert_infer.backends.tensorrt.build import build_engine
        from tests.models.tensorrt_models import small_encoder
        engine = build_engine(load("tensorrt_rtx"), small_encoder(), [Profile(16, 2, 2)], target="sm89").engine
        print(len(engine) > 0)
    """
    root = PACKAGE.parent
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=root, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
