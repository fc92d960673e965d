"""Each thing that may be wrong with a machine is found, and named with its cure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sbert_infer.doctor.machine import Gpu, Machine, nvidia_cards
from sbert_infer.doctor.packages import MODULES, Package, Packages
from sbert_infer.doctor.problems import find_problems
from tests.doubles.packages import install_tensorrt

CPU_ONLY = Machine(
    python="CPython 3.12.1",
    os="Linux 6.1 x86_64",
    cpu="a CPU",
    instructions=("AVX2",),
    cores=8,
    usable_cores=4,
    cpu_quota=3.5,
    memory_gb=32.0,
    memory_limit_gb=16.0,
    nvidia_cards=0,
    driver_problem="there is no NVIDIA driver",
    driver_release=None,
    driver_cuda=None,
    gpus=(),
)
WITH_GPU = replace(
    CPU_ONLY,
    nvidia_cards=1,
    driver_problem=None,
    driver_release="580.95.05",
    driver_cuda=(13, 0),
    gpus=(Gpu("NVIDIA L4", "sm89", 24.0),),
)
OLD_DRIVER = replace(WITH_GPU, driver_release="550.54.15", driver_cuda=(12, 4))

FOR_CPUS = Package("onnxruntime", "1.31.1", facts={"providers": ["CPUExecutionProvider"]})
FOR_GPUS = Package(
    "onnxruntime", "1.31.1", cuda=13, facts={"providers": ["CUDAExecutionProvider", "CPUExecutionProvider"]}
)
EVERYTHING = (
    FOR_GPUS,
    Package("tensorrt", "11.4.0.106", cuda=13),
    Package("cuda-bindings", "13.5.0", cuda=13),
    Package("torch", "2.13.0", cuda=13, facts={"cuda": "13.0", "gpu": True}),
    Package("triton", "3.7.1"),
)


def packages(*found: Package, onnxruntimes: tuple[str, ...] = (), **options: Any) -> Packages:
    """Packages of which only `found` are installed."""
    nothing = {names[0]: Package(names[0]) for names in MODULES.values()}
    there = {**nothing, **{package.name: package for package in found}}
    return Packages(there, onnxruntimes, **{"tensorrt_majors": {}, "torch_triton": None, **options})


def names(machine: Machine, there: Packages, *, notes: bool = False) -> list[str]:
    return [problem.name for problem in find_problems(machine, there) if problem.note == notes]


def test_a_machine_for_cpus_that_is_well() -> None:
    assert find_problems(CPU_ONLY, packages(FOR_CPUS, onnxruntimes=("onnxruntime",))) == []
    builds = packages(FOR_CPUS, Package("tensorrt_rtx", "1.7.1.116", cuda=13), onnxruntimes=("onnxruntime",))
    assert find_problems(CPU_ONLY, builds) == []  # it builds TensorRT engines without a GPU


def test_a_machine_with_a_gpu_that_is_well() -> None:
    there = packages(*EVERYTHING, onnxruntimes=("onnxruntime-gpu",), torch_triton="3.7.1")
    assert find_problems(WITH_GPU, there) == []


def the_problem(machine: Machine, there: Packages) -> tuple[str, str, str]:
    (problem,) = [problem for problem in find_problems(machine, there) if not problem.note]
    assert problem.consequence
    return problem.name, problem.what, problem.cure


def test_no_onnxruntime() -> None:
    assert the_problem(CPU_ONLY, packages())[2] == "pip install 'sbert-infer[cpu]'"
    assert the_problem(WITH_GPU, packages())[2] == "pip install 'sbert-infer[gpu]'"


def test_both_onnxruntimes() -> None:
    both = ("onnxruntime", "onnxruntime-gpu")
    name, what, cure = the_problem(WITH_GPU, packages(FOR_CPUS, onnxruntimes=both))
    assert name == "two-onnxruntimes"
    assert "the one without CUDA came last" in what
    assert cure == "pip install --force-reinstall --no-deps onnxruntime-gpu"
    cured = packages(*EVERYTHING, onnxruntimes=both)
    assert names(WITH_GPU, cured) == []
    assert names(WITH_GPU, cured, notes=True) == ["two-onnxruntimes"]


def test_an_onnxruntime_that_is_broken() -> None:
    there = packages(replace(FOR_CPUS, error="ImportError: libfoo.so: no such file"), onnxruntimes=("onnxruntime",))
    name, what, cure = the_problem(CPU_ONLY, there)
    assert name == "broken-onnxruntime"
    assert "libfoo.so" in what
    assert cure.startswith("pip install --force-reinstall --no-deps onnxruntime")


def test_a_package_that_is_broken() -> None:
    there = packages(FOR_CPUS, Package("torch", "2.13.0", error="it crashed (SIGSEGV)"), onnxruntimes=("onnxruntime",))
    name, what, cure = the_problem(CPU_ONLY, there)
    assert name == "broken-package"
    assert what == "torch 2.13.0 can't be imported: it crashed (SIGSEGV)"
    assert cure == "pip install --force-reinstall --no-deps torch"


def test_no_driver() -> None:
    well = packages(FOR_CPUS, onnxruntimes=("onnxruntime",))
    name, what, cure = the_problem(replace(CPU_ONLY, nvidia_cards=2), well)
    assert name == "driver"
    assert what == "there is no NVIDIA driver, but the machine has 2 NVIDIA GPU(s)"
    assert "install NVIDIA's driver" in cure
    assert "--gpus all" in cure
    name, what, cure = the_problem(CPU_ONLY, packages(FOR_GPUS, onnxruntimes=("onnxruntime-gpu",)))
    assert name == "driver"
    assert "onnxruntime-gpu can only be meant for one" in what
    assert "'sbert-infer[cpu]'" in cure


def test_an_old_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install_tensorrt(tmp_path))
    there = packages(*EVERYTHING, onnxruntimes=("onnxruntime-gpu",))
    found = {problem.what.split()[0]: problem for problem in find_problems(OLD_DRIVER, there)}
    assert {problem.name for problem in found.values()} == {"driver-too-old"}
    assert "made for CUDA 13, and this driver has 12.4" in found["tensorrt"].what
    cures = {name: problem.cure.removeprefix("update to driver 580 or newer, or ") for name, problem in found.items()}
    assert cures == {
        "tensorrt": "pip uninstall -y tensorrt tensorrt-cu13 tensorrt-cu13-libs tensorrt-cu13-bindings "
        "&& pip install tensorrt-cu12 'cuda-bindings<13'",
        "cuda-bindings": "pip install 'cuda-bindings<13'",
        "onnxruntime-gpu": "pip install 'onnxruntime-gpu[cuda,cudnn]<1.27'",
        "torch": "pip install 'torch<2.11'",
    }


def test_two_tensorrts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_tensorrt(tmp_path)
    monkeypatch.syspath_prepend(install_tensorrt(tmp_path / "more", major=12))
    monkeypatch.syspath_prepend(tmp_path)
    there = packages(*EVERYTHING, onnxruntimes=("onnxruntime-gpu",), tensorrt_majors={"tensorrt": (12, 13)})
    name, what, cure = the_problem(WITH_GPU, there)
    assert (name, what) == ("two-tensorrts", "tensorrt is installed for CUDA 12 and 13, into the same folder")
    assert "tensorrt-cu12-libs" in cure
    assert cure.endswith("&& pip install tensorrt-cu13 'cuda-bindings<14'")


def test_what_a_gpu_could_use() -> None:
    there = packages(FOR_CPUS, Package("torch", "2.13.0+cpu", facts={"cuda": None}), onnxruntimes=("onnxruntime",))
    assert names(WITH_GPU, there) == []
    assert names(WITH_GPU, there, notes=True) == ["no-tensorrt", "no-cuda-provider", "torch-for-cpus"]
    without = [package for package in EVERYTHING if package.name != "cuda-bindings"]
    name, _, cure = the_problem(WITH_GPU, packages(*without, onnxruntimes=("onnxruntime-gpu",)))
    assert (name, cure) == ("no-cuda-bindings", "pip install cuda-bindings")


def test_versions_that_do_not_go_together() -> None:
    there = packages(
        *EVERYTHING,
        Package("cuda-bindings", "12.9.4", cuda=12),
        onnxruntimes=("onnxruntime-gpu",),
        torch_triton="3.6.0",
    )
    found = find_problems(WITH_GPU, there)
    assert [problem.name for problem in found] == ["cuda-bindings-differ", "triton-differs"]
    assert [problem.cure for problem in found] == ["pip install 'cuda-bindings>=13,<14'", "pip install triton==3.6.0"]
    assert all(problem.note for problem in found)


def test_cards_on_the_bus(tmp_path: Path) -> None:
    for number, (vendor, kind) in enumerate([("0x10de", "0x030000"), ("0x10de", "0x040300"), ("0x8086", "0x030000")]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(f"{vendor}\n")
        (tmp_path / str(number) / "class").write_text(f"{kind}\n")
    (tmp_path / "empty").mkdir()
    assert nvidia_cards(tmp_path) == 1  # the second is its sound
    assert nvidia_cards(tmp_path / "nowhere") == 0
