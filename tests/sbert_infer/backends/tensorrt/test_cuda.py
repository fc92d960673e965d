"""The driver can be asked for anywhere, and errors name the CUDA call that failed.

CUDA is a double here: see tests/doubles/cuda.py.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbert_infer import EngineError
from sbert_infer.backends.tensorrt import cuda

pytest.importorskip("cuda.bindings.runtime")

from tests.doubles.cuda import REAL_CUDA, DoubleRuntime, Machine, double_driver

SOURCE = Path(cuda.__file__).read_text(encoding="utf-8")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    runtime = DoubleRuntime(machine)
    monkeypatch.setattr(cuda, "_runtime", lambda: runtime)
    return machine


# --------------------------------------------------------------------------------------------------
# The driver


def use_driver(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    def load(name: str) -> Any:
        assert name == ("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, None)
    assert cuda.driver_problem() == "there is no NVIDIA driver"
    assert cuda.driver_cuda() is None
    with pytest.raises(EngineError, match="there is no NVIDIA driver"):
        cuda.device_count()


def test_a_driver_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, double_driver(Machine(), code=803))
    assert cuda.driver_problem() == "the NVIDIA driver does not start (cuInit gives CUDA_ERROR_803)"


@pytest.mark.parametrize(("gpus", "code"), [(0, 0), (0, 100), (1, 100)])
def test_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch, gpus: int, code: int) -> None:
    use_driver(monkeypatch, double_driver(Machine(gpus), code=code))
    assert cuda.driver_problem() == "the NVIDIA driver sees no GPU"


@pytest.mark.parametrize(("capability", "name"), [(75, "sm75"), (89, "sm89"), (120, "sm120"), (121, "sm121")])
def test_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: int, name: str) -> None:
    use_driver(monkeypatch, double_driver(Machine(2), name="NVIDIA Nothing", capability=capability))
    assert cuda.driver_problem() is None
    assert cuda.device_count() == 2
    assert cuda.compute_capability(1) == name
    assert cuda.device_name(0) == "NVIDIA Nothing"
    assert cuda.device_memory(1) == 24 * 2**30
    with pytest.raises(EngineError, match="cuDeviceGet failed: CUDA_ERROR_101"):
        cuda.device_name(2)


@pytest.mark.parametrize(("version", "cuda_version"), [(11080, (11, 8)), (12040, (12, 4)), (13000, (13, 0))])
def test_the_cuda_of_a_driver(monkeypatch: pytest.MonkeyPatch, version: int, cuda_version: tuple[int, int]) -> None:
    use_driver(monkeypatch, double_driver(Machine(0), code=100, version=version))  # even if it sees no GPU
    assert cuda.driver_cuda() == cuda_version


def test_the_real_machine_can_be_asked() -> None:
    """Whatever the machine has, asking must not crash; it is done in a process of its own."""
    code = "from sbert_infer.backends.tensorrt import cuda; print(cuda.driver_problem() or cuda.device_name(0))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip()


def test_importing_it_loads_nothing() -> None:
    code = (
        "import sys;"
        "from sbert_infer.backends.tensorrt import backend, build, cuda;"
        "sys.exit(any(name.split('.')[0] in ('cuda', 'torch', 'tensorrt', 'tensorrt_rtx') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --------------------------------------------------------------------------------------------------
# The real bindings


def test_all_that_is_used_exists_in_the_real_bindings() -> None:
    called = {
        str(node.args[0].value): len(node.args) - 1
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_call"
        if isinstance(node.args[0], ast.Constant)
    }
    assert len(called) >= 15
    for name, arguments in called.items():
        assert len(inspect.signature(getattr(REAL_CUDA, name)).parameters) == arguments, name
    for name in set(re.findall(r"untime(?:\(\))?\.(cuda[\w.]+)", SOURCE)):
        found = REAL_CUDA
        for part in name.split("."):
            found = getattr(found, part)


def test_the_double_has_the_real_signatures() -> None:
    functions = {
        name: value for name, value in vars(DoubleRuntime).items() if inspect.isfunction(value) and name[0] != "_"
    }
    assert len(functions) >= 15
    for name, function in functions.items():
        real = list(inspect.signature(getattr(REAL_CUDA, name)).parameters)
        assert list(inspect.signature(function).parameters)[1:] == real, name


def test_the_real_bindings_without_a_gpu_give_an_error() -> None:
    if cuda.driver_problem() is None:
        pytest.skip("there is a GPU")
    with pytest.raises(EngineError, match=r"cudaMalloc failed: cudaError\w+ \(.+\)"):
        cuda.DeviceBuffer(16)


def test_bindings_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    cuda._runtime.cache_clear()
    with pytest.raises(EngineError, match="pip install cuda-bindings"):
        cuda.set_device(0)


# --------------------------------------------------------------------------------------------------
# Memory and streams


def test_copies_are_done_when_they_are_waited_for(machine: Machine) -> None:
    stream, there = cuda.Stream(), cuda.DeviceBuffer(32)
    sent, back = cuda.HostBuffer(np.int64, 4), cuda.HostBuffer(np.int64, 4)
    sent.array[:] = [1, 2, 3, 4]
    back.array[:] = 0
    cuda.copy_to_device(there, sent, 32, stream)
    cuda.copy_to_host(back, there, 24, stream)
    stream.synchronize()
    assert back.array.tolist() == [1, 2, 3, 0]
    for resource in (stream, sent, there, back):
        resource.close()
    assert not +machine.alive


def test_a_graph_repeats_what_was_recorded(machine: Machine) -> None:
    stream, host, device = cuda.Stream(), cuda.HostBuffer(np.int64, 1), cuda.DeviceBuffer(8)
    graph = cuda.Graph(stream, lambda: cuda.copy_to_device(device, host, 8, stream))
    for value in (5, 6):
        host.array[0] = value
        graph.launch(stream)
        stream.synchronize()
        assert machine.at(device.pointer, np.int64, (1,)) == value
    for resource in (graph, device, host, stream):
        resource.close()
    assert not +machine.alive


def test_a_recording_that_fails_leaves_the_stream_usable(machine: Machine) -> None:
    stream = cuda.Stream()

    def fail() -> None:
        raise EngineError("no")

    with pytest.raises(EngineError, match="no"):
        cuda.Graph(stream, fail)
    assert machine.streams[int(stream)].recording is None
    assert not machine.alive["graph"]


@pytest.mark.parametrize(
    ("function", "use"),
    [
        ("cudaSetDevice", lambda: cuda.set_device(0)),
        ("cudaStreamCreateWithFlags", cuda.Stream),
        ("cudaEventCreateWithFlags", cuda.Stream),
        ("cudaMalloc", lambda: cuda.DeviceBuffer(8)),
        ("cudaHostAlloc", lambda: cuda.HostBuffer(np.int64, 8)),
        ("cudaEventSynchronize", lambda: cuda.Stream().synchronize()),
        ("cudaStreamEndCapture", lambda: cuda.Graph(cuda.Stream(), lambda: None)),
        ("cudaGraphInstantiate", lambda: cuda.Graph(cuda.Stream(), lambda: None)),
    ],
)
def test_a_call_that_fails_is_named(machine: Machine, function: str, use: Callable[[], object]) -> None:
    machine.failures[function] = [REAL_CUDA.cudaError_t.cudaErrorMemoryAllocation]
    with pytest.raises(EngineError, match=rf"^{function} failed: cudaErrorMemoryAllocation \(out of memory\)$"):
        use()
    assert not machine.alive["graph"]
    assert machine.alive["stream"] == machine.alive["event"]
    assert "cudaGetLastError" in machine.names()  # otherwise the next call would report the error
