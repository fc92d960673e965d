"""Which backend a plan gets on which machine. GPUs, TensorRT and backends are fakes here."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from sbert_infer import CorruptError, EngineError, SbertInferWarning
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.manifest import SENTENCE
from sbert_infer.artifact.plan_file import EngineFile, PackedRowsModel, Plan, open_plan, write_plan
from sbert_infer.backends import select as backends
from sbert_infer.backends.select import BackendOptions, WouldBuildError, open_backend
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.build import BuiltEngine
from sbert_infer.backends.tensorrt.loaded_engine import LoadError
from sbert_infer.types import Shape
from tests.doubles.packages import install, install_tensorrt

ROWS = PackedRowsModel(("input_ids", "segment_ids", "starts", "ends"), 32, (Shape(1, 64, 16), Shape(8, 64, 16)))
LIMIT = 8 * 64  # tokens of the largest shape


@dataclass(frozen=True)
class FakeTensorRT:
    name: str = "tensorrt"
    version: str = "10.13.3"

    @property
    def any_target(self) -> bool:
        return self.name == "tensorrt_rtx"


@dataclass
class Machine:
    """What the machine of a test has, and a record of what was done on it."""

    driver: str | None = None  # what is wrong with the driver
    targets: dict[int, str] = field(default_factory=lambda: {0: "sm89", 1: "sm89", 2: "sm90", 3: "sm89"})
    models: dict[int, str] = field(default_factory=lambda: {0: "GPU A", 1: "GPU A", 2: "GPU B", 3: "GPU C"})
    tensorrt: list[FakeTensorRT] = field(default_factory=lambda: [FakeTensorRT()])
    refused_engine: bytes = b""  # bytes that TensorRT can't load
    memory_problem: str = ""
    build_problem: str = ""
    cuda_problem: str = ""  # why onnxruntime can't use the GPU
    built: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)  # that TensorRT engines were built for
    timings: list[bytes] = field(default_factory=list)  # timing caches that builds started with
    graphs: list[str] = field(default_factory=list)  # that onnxruntime ran on the GPU
    closed: int = 0


class FakeBackend:
    max_batch_tokens = LIMIT

    def __init__(self, machine: Machine, text: str) -> None:
        self._machine, self._text = machine, text

    def describe(self) -> str:
        return self._text

    def close(self) -> None:
        self._machine.closed += 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    machine = Machine()

    def tensorrt_backend(trt: Any, engine: bytes, packer: Any, interface: Any, *, devices: Any, **_: Any) -> Any:
        assert packer.shapes == ROWS.shapes
        if engine == machine.refused_engine:
            raise LoadError("TensorRT can't load the engine")
        if machine.memory_problem:
            raise EngineError(machine.memory_problem)
        assert interface.inputs == ROWS.inputs
        return FakeBackend(machine, f"{trt.name} {engine.decode()} on {list(devices)}")

    def build_engine(
        trt: Any, model: bytes, shapes: Any, *, output: str, precision: str, timing_cache: bytes, device: int
    ) -> BuiltEngine:
        assert (shapes, precision) == (ROWS.shapes, "fp16")
        if machine.build_problem:
            raise EngineError(machine.build_problem)
        machine.built.append(trt.version)
        machine.outputs.append(output)
        machine.timings.append(timing_cache)
        return BuiltEngine(f"built from {model.decode()}".encode(), timing_cache + trt.version.encode())

    def onnx_cuda(model: Any, gpus: Any, **_: Any) -> FakeBackend:
        if machine.cuda_problem:
            raise EngineError(machine.cuda_problem)
        machine.graphs.append(model.name)
        return FakeBackend(machine, f"onnxruntime on {list(gpus)}")

    monkeypatch.setenv("SBERT_INFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda, "driver_problem", lambda: machine.driver)
    monkeypatch.setattr(cuda, "compute_capability", machine.targets.__getitem__)
    monkeypatch.setattr(cuda, "device_name", machine.models.__getitem__)
    monkeypatch.setattr(cuda, "device_count", lambda: len(machine.targets))
    monkeypatch.setattr(backends, "installed", lambda: machine.tensorrt)
    monkeypatch.setattr(backends, "TensorRTBackend", tensorrt_backend)
    monkeypatch.setattr("sbert_infer.backends.tensorrt.build_cache.build_engine", build_engine)
    monkeypatch.setattr(backends, "OnnxCudaBackend", onnx_cuda)
    monkeypatch.setattr(backends, "OnnxBackend", lambda model, **_: FakeBackend(machine, "onnxruntime on CPU"))
    return machine


@pytest.fixture
def make_plan(small_onnx: Path, tmp_path: Path) -> Callable[..., Plan]:
    def make(*engines: EngineFile, pooling: str = "graph", cuda_graph: bytes | None = b"the CUDA graph") -> Plan:
        artifact = open_artifact(small_onnx)
        path = tmp_path / "model.plan"
        with path.open("wb") as file:
            write_plan(
                file,
                replace(artifact.manifest, precision="fp16"),
                artifact.tokenizer_json,
                model=b"the model",
                cpu_graph=b"the graph",
                cuda_graph=cuda_graph,
                engines={engine: f"engine for {engine.gpu or engine.target}".encode() for engine in engines},
                rows=ROWS,
                pooling=pooling,
            )
        return open_plan(path)

    return make


FITS = EngineFile("tensorrt", "10.13.3", "sm89", "GPU A")
OTHERS = (
    EngineFile("tensorrt", "10.1.0", "sm89", "GPU A"),
    EngineFile("tensorrt", "10.13.3", "sm90", "GPU B"),
    EngineFile("tensorrt", "10.13.3", "sm89", "GPU D"),
)


def opened(plan: Plan, **options: Any) -> tuple[str, list[str]]:
    """Open a plan; return the backend's description and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = open_backend(plan, BackendOptions(**options)).describe()
    assert all(issubclass(warning.category, SbertInferWarning) for warning in caught)
    return text, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("strict", [False, True])
def test_an_engine_inside(strict: bool, machine: Machine, make_plan: Callable[..., Plan]) -> None:
    assert opened(make_plan(*OTHERS, FITS), strict=strict) == ("tensorrt engine for GPU A on [0]", [])
    assert not machine.built


def test_devices(machine: Machine, make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(*OTHERS, FITS)
    assert opened(plan, device="cuda:1")[0] == "tensorrt engine for GPU A on [1]"
    assert opened(plan, device="cuda:2")[0] == "tensorrt engine for GPU B on [2]"
    assert opened(plan, device=["cuda:1", "cuda:0"])[0] == "tensorrt engine for GPU A on [1, 0]"
    text, (warning,) = opened(plan, device=["cuda:0", "cuda:2"])
    assert text == "onnxruntime on [0, 2]"
    assert warning.count("cuda:0 is GPU A (sm89), cuda:2 is GPU B (sm90)") == 1
    assert "cuda:3 is GPU C" in opened(plan, device=["cuda:0", "cuda:3"])[1][0]  # also sm89, but another model of GPU
    assert "no cuda:7" in opened(plan, device="cuda:7")[1][0]
    for wrong in ("gpu", "cuda:x", [], ["cpu", "cuda"], ["cuda", "cuda:0"]):
        with pytest.raises(ValueError, match="device"):
            opened(plan, device=wrong)


def test_an_engine_of_the_other_tensorrt(machine: Machine, make_plan: Callable[..., Plan]) -> None:
    machine.tensorrt.append(FakeTensorRT("tensorrt_rtx", "1.7.1.116"))
    plan = make_plan(EngineFile("tensorrt_rtx", "1.7.1.116", "sm89"))
    assert opened(plan) == ("tensorrt_rtx engine for sm89 on [0]", [])


@pytest.mark.parametrize("engines", [(), OTHERS])
def test_an_engine_is_built_once(engines: Any, machine: Machine, make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(*engines)
    with pytest.raises(EngineError, match="would have to be built"):
        opened(plan, strict=True)
    text, (warning,) = opened(plan)
    assert text == "tensorrt built from the model on [0]"
    assert "no engine for tensorrt 10.13.3 on GPU A" in warning
    assert "one was built" in warning
    assert opened(plan) == (text, [])  # from the cache, so no warning
    assert opened(plan, strict=True) == (text, [])
    assert machine.built == ["10.13.3"]
    machine.tensorrt[0] = FakeTensorRT(version="11.0")
    assert opened(plan)[0] == text
    machine.targets[0] = "sm120"
    assert opened(plan)[0] == text
    assert machine.built == ["10.13.3", "11.0", "11.0"]


def test_timings_are_kept_for_the_next_build(machine: Machine, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    opened(make_plan())
    for file in tmp_path.rglob("*.engine"):
        file.unlink()
    opened(make_plan())
    machine.tensorrt[0] = FakeTensorRT(version="11.0")
    opened(make_plan())
    assert machine.timings == [b"", b"10.13.3", b""]  # only timings of the same version are used


def test_an_engine_that_tensorrt_can_not_load(machine: Machine, make_plan: Callable[..., Plan]) -> None:
    machine.refused_engine = b"engine for GPU A"
    text, (warning,) = opened(make_plan(FITS))
    assert text == "tensorrt built from the model on [0]"
    assert "can't load the engine" in warning


def test_a_kept_engine_that_tensorrt_can_not_load_is_built_again(
    machine: Machine, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    plan = make_plan()
    opened(plan)
    (file,) = tmp_path.rglob("*.engine")
    stale = b"from another time"
    file.write_bytes(hashlib.sha256(stale).hexdigest().encode() + stale)
    machine.refused_engine = stale
    text, (warning,) = opened(plan)
    assert text == "tensorrt built from the model on [0]"
    assert "can't load the engine" in warning
    assert opened(plan) == (text, [])


def test_what_building_would_not_help_is_not_built(machine: Machine, make_plan: Callable[..., Plan]) -> None:
    machine.memory_problem = "cudaMalloc failed: out of memory"
    text, (warning,) = opened(make_plan(FITS))
    assert text == "onnxruntime on [0]"
    assert "out of memory" in warning
    for options in ({"workers": 2}, {"max_batch_tokens": LIMIT + 1}):
        with pytest.raises(ValueError, match=r"for CPUs|at most"):
            opened(make_plan(), **options)
    assert not machine.built


def test_a_kernel_that_is_not_installed_is_noticed_on_opening(
    machine: Machine, make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(FITS, pooling="kernel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: True)
        assert opened(plan) == ("tensorrt engine for GPU A on [0]", [])
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(EngineError, match="triton is missing"):
        opened(plan, strict=True)
    text, (warning,) = opened(plan)
    assert text == "tensorrt built from the model on [0]"
    assert "triton is missing: pip install" in warning
    assert machine.outputs == [SENTENCE]  # the graph pools


@pytest.fixture
def int8_onnx(export_checkpoint: Callable[..., Path]) -> Path:
    return export_checkpoint("bert", int8=True)


def test_8_bit_is_refused_on_a_gpu(int8_onnx: Path, machine: Machine) -> None:
    artifact = open_artifact(int8_onnx)
    with pytest.raises(EngineError, match="for CPUs"):
        open_backend(artifact, BackendOptions(device="cuda"))


def test_onnxruntime_on_the_gpu(machine: Machine, make_plan: Callable[..., Plan]) -> None:
    machine.build_problem = "TensorRT lacks the operator Foo"
    plan = make_plan()
    text, (warning,) = opened(plan)
    assert text == "onnxruntime on [0]"
    assert "operator Foo" in warning
    with pytest.raises(EngineError):
        opened(plan, strict=True)
    assert machine.closed == 1  # the backend opened in vain was closed
    machine.tensorrt.clear()
    text, (warning,) = opened(plan)
    assert text == "onnxruntime on [0]"
    assert "TensorRT is not installed" in warning
    assert machine.graphs == ["cuda.onnx"] * 3
    assert opened(make_plan(pooling="kernel"))[0] == "onnxruntime on [0]"  # its graph pools
    assert opened(make_plan(cuda_graph=None))[0] == "onnxruntime on [0]"
    assert machine.graphs[3:] == ["cuda.onnx", "cpu.onnx"]


def test_better_choices_are_named_with_the_reason(machine: Machine, make_plan: Callable[..., Plan]) -> None:
    def passed_over(**options: Any) -> tuple[str, list[tuple[str, str]]]:
        found: list[tuple[str, str]] = []
        text, _ = opened(make_plan(), passed_over=lambda choice, why: found.append((choice, why)), **options)
        return text, found

    text, (built,) = passed_over()
    assert text.startswith("tensorrt built")
    assert built[0] == "a TensorRT engine that is ready"
    assert "it holds no engine for tensorrt 10.13.3" in built[1]
    assert passed_over()[1] == []  # from the cache
    machine.tensorrt.clear()
    text, (tensorrt,) = passed_over()
    assert (text, tensorrt[0]) == ("onnxruntime on [0]", "TensorRT")
    assert "pip install 'sbert-infer[tensorrt]'" in tensorrt[1]
    machine.cuda_problem = "no CUDA provider"
    text, choices = passed_over()
    assert (text, choices) == ("onnxruntime on CPU", [tensorrt, ("onnxruntime on the GPU", "no CUDA provider")])
    machine.driver = "no NVIDIA driver"
    text, choices = passed_over()
    assert (text, choices) == ("onnxruntime on CPU", [("a GPU", f"no NVIDIA driver: {cuda.DRIVER_CURE}")])
    assert passed_over(device="cpu") == ("onnxruntime on CPU", [])


def test_nothing_is_built_if_building_is_forbidden(machine: Machine, make_plan: Callable[..., Plan]) -> None:
    with pytest.raises(WouldBuildError, match=r"it holds no engine.*built at first use"):
        opened(make_plan(), build=False)
    assert not machine.built
    opened(make_plan())
    assert opened(make_plan(), build=False)[1] == []  # from the cache


def test_a_driver_that_is_too_old_for_tensorrt(
    machine: Machine, make_plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install_tensorrt(tmp_path / "site"))
    monkeypatch.setattr(cuda, "driver_cuda", lambda: (12, 4))
    monkeypatch.setattr("sbert_infer.backends.tensorrt.cuda_packages._made_for_bindings", lambda: 12)
    text, (warning,) = opened(make_plan(FITS))
    assert text == "onnxruntime on [0]"
    assert "update the driver, or pip uninstall -y tensorrt" in warning
    machine.tensorrt.append(FakeTensorRT("tensorrt_rtx", "1.7.1.116"))
    assert "tensorrt_rtx" not in opened(make_plan(FITS))[0]  # the real one here is made for CUDA 13, too
    monkeypatch.setattr(cuda, "driver_cuda", lambda: (13, 0))
    assert opened(make_plan(FITS)) == ("tensorrt engine for GPU A on [0]", [])


def test_bindings_that_the_driver_is_too_old_for(
    machine: Machine, make_plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_tensorrt(tmp_path / "site", major=12)
    monkeypatch.syspath_prepend(install(tmp_path / "site", "cuda-bindings", "13.5.0"))
    monkeypatch.setattr(cuda, "driver_cuda", lambda: (12, 8))
    text, (warning,) = opened(make_plan(FITS))
    assert text == "onnxruntime on [0]"
    assert "cuda-bindings 13.5.0 is made for CUDA 13" in warning
    assert "pip install 'cuda-bindings<13'" in warning


def test_the_cpu_last(machine: Machine, make_plan: Callable[..., Plan]) -> None:
    machine.build_problem, machine.cuda_problem = "no memory", "no CUDA provider"
    text, (warning,) = opened(make_plan())
    assert text == "onnxruntime on CPU"
    assert "no memory" in warning
    assert "no CUDA provider" in warning


def test_no_driver(machine: Machine, make_plan: Callable[..., Plan]) -> None:
    machine.driver = "no NVIDIA driver"
    plan = make_plan(FITS)
    text, (warning,) = opened(plan)
    assert text == "onnxruntime on CPU"
    assert warning == f"{plan.path} runs with onnxruntime on CPU: no NVIDIA driver"
    assert opened(plan, device="cpu") == ("onnxruntime on CPU", [])  # chosen by the user, so no warning
    for options in ({"strict": True}, {"device": "cuda"}, {"device": ["cuda:0", "cuda:1"]}):
        with pytest.raises(EngineError, match="no NVIDIA driver"):
            opened(plan, **options)


def test_a_damaged_engine_is_an_error(machine: Machine, make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(FITS)
    content = plan.path.read_bytes()
    plan.path.write_bytes(content.replace(b"engine for GPU A", b"engine for GPU _"))
    with pytest.raises(CorruptError, match=r"damaged|changed"):
        opened(plan)


def test_settings_for_cpus_are_refused_on_a_gpu(machine: Machine, make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(FITS)
    for options in ({"workers": 2}, {"threads": 2}):
        with pytest.raises(ValueError, match="for CPUs"):
            opened(plan, **options)
    with pytest.raises(ValueError, match=f"at most {LIMIT}"):
        opened(plan, max_batch_tokens=LIMIT + 1)
    assert open_backend(plan, BackendOptions(max_batch_tokens=200)).max_batch_tokens == 200
