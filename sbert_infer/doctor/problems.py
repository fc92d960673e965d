"""What is wrong with a machine and its packages, what follows from it, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sbert_infer.backends.onnxruntime_install import BOTH, CUDA_PROVIDER, REINSTALL_GPU, broken
from sbert_infer.backends.tensorrt.cuda import DRIVER_CURE
from sbert_infer.backends.tensorrt.cuda_packages import OLDEST_DRIVER, replacement, tensorrt_packages
from sbert_infer.doctor.machine import Machine
from sbert_infer.doctor.packages import Package, Packages

_CONSEQUENCES = {  # of a package that is made for a newer CUDA than the driver's
    "tensorrt": "TensorRT does not start (cudaErrorInsufficientDriver): plans run without it, and slower",
    "tensorrt_rtx": "its TensorRT engines can be built, but not run",
    "cuda-bindings": "TensorRT engines can't run: plans run without them, and slower",
    "onnxruntime-gpu": "its CUDA provider does not start: nothing runs on the GPU without TensorRT",
    "torch": "torch can't use the GPU, nor can the pooling kernel or eager models in sbert-bench",
}


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, or, if it is a `note`, only worth knowing."""

    name: str  # stable, for programs
    what: str
    consequence: str
    cure: str
    note: bool = False


def find_problems(machine: Machine, packages: Packages) -> list[Problem]:
    """Return all problems and notes, the most basic first."""
    searches = (_driver, _onnxruntime, _broken, _two_tensorrts, _driver_too_old, _for_the_gpu, _mismatches)
    return [problem for search in searches for problem in search(machine, packages)]


def _driver(machine: Machine, packages: Packages) -> Iterator[Problem]:
    if machine.driver_problem is None:
        return
    for_gpus = [name for name in ("onnxruntime-gpu", "tensorrt") if _is_there(name, packages)]
    if machine.nvidia_cards:
        what = f"{machine.driver_problem}, but the machine has {machine.nvidia_cards} NVIDIA GPU(s)"
        yield Problem("driver", what, "nothing runs on a GPU", DRIVER_CURE)
    elif for_gpus:
        what = f"{machine.driver_problem}, but {' and '.join(for_gpus)} can only be meant for one"
        cure = f"{DRIVER_CURE}; on a machine without a GPU, install 'sbert-infer[cpu]' into a new environment"
        yield Problem("driver", what, "nothing runs on a GPU", cure)


def _is_there(name: str, packages: Packages) -> bool:
    return name in packages.onnxruntimes if name == "onnxruntime-gpu" else packages[name].version is not None


def _onnxruntime(machine: Machine, packages: Packages) -> Iterator[Problem]:
    found, both = packages["onnxruntime"], len(packages.onnxruntimes) == 2
    providers = found.facts.get("providers", [])
    if found.version is None:
        extra = "cpu" if machine.driver_problem else "gpu"
        lost = "no artifact runs on a CPU, and none on a GPU without TensorRT"
        yield Problem("no-onnxruntime", "onnxruntime is not installed", lost, f"pip install 'sbert-infer[{extra}]'")
    elif found.error is not None:
        what, _, cure = broken(found.error).rpartition(": ")
        yield Problem("broken-onnxruntime", what, "no artifact runs on a CPU", cure)
    elif both and CUDA_PROVIDER not in providers:
        what = f"{BOTH}, and the one without CUDA came last"
        yield Problem("two-onnxruntimes", what, "onnxruntime can't use a GPU", REINSTALL_GPU)
    elif both:
        lost = "it works, but uninstalling or updating either breaks it"
        yield Problem("two-onnxruntimes", BOTH, lost, f"pip uninstall -y onnxruntime && {REINSTALL_GPU}", note=True)


def _broken(machine: Machine, packages: Packages) -> Iterator[Problem]:
    for package in packages.found.values():
        if package.error is not None and package.name != "onnxruntime":
            name = (tensorrt_packages(package.name) or [package.name])[0]
            what = f"{package.name} {package.version} can't be imported: {package.error}"
            cure = f"pip install --force-reinstall --no-deps {name}"
            yield Problem("broken-package", what, "what needs it does not work", cure)


def _two_tensorrts(machine: Machine, packages: Packages) -> Iterator[Problem]:
    for module, majors in packages.tensorrt_majors.items():
        if len(majors) > 1:
            there = " and ".join(map(str, majors))
            what = f"{module} is installed for CUDA {there}, into the same folder"
            keep = machine.driver_cuda[0] if machine.driver_cuda else max(majors)
            cure = replacement(module, min(keep, max(majors)))
            yield Problem("two-tensorrts", what, "files of one have overwritten those of the other", cure)


def _driver_too_old(machine: Machine, packages: Packages) -> Iterator[Problem]:
    if machine.driver_cuda is None:
        return
    major, minor = machine.driver_cuda
    for name, consequence in _CONSEQUENCES.items():
        package = packages["onnxruntime" if name == "onnxruntime-gpu" else name]
        if package.cuda is not None and package.cuda > major:
            needs = f"driver {OLDEST_DRIVER[package.cuda]}" if package.cuda in OLDEST_DRIVER else "a newer driver"
            what = f"{name} {package.version} is made for CUDA {package.cuda}, and this driver has {major}.{minor}"
            other = replacement(name, major)
            cure = f"update to {needs} or newer" + (f", or {other}" if other else "")
            yield Problem("driver-too-old", what, consequence, cure)


def _for_the_gpu(machine: Machine, packages: Packages) -> Iterator[Problem]:
    """Find what is missing where a GPU works. Any one way to use it may be enough."""
    if machine.driver_problem is not None:
        return
    onnxruntime, torch = packages["onnxruntime"], packages["torch"]
    trts = [packages[name] for name in ("tensorrt", "tensorrt_rtx")]
    if not any(map(_works, trts)):
        lost = "plans run with onnxruntime's CUDA provider, or on the CPU: slower"
        cure = "pip install $(sbert-doctor --requirements)"
        yield Problem("no-tensorrt", "there is a GPU, but no TensorRT", lost, cure, note=True)
    elif not _works(packages["cuda-bindings"]):
        lost = "TensorRT engines can't run"
        yield Problem("no-cuda-bindings", "cuda-bindings is not installed", lost, "pip install cuda-bindings")
    if _works(onnxruntime) and packages.onnxruntimes == ("onnxruntime",):
        lost = "model.onnx runs on the CPU only, and so does a plan without a TensorRT engine for this GPU"
        cure = "pip uninstall -y onnxruntime && pip install 'sbert-infer[gpu]'"
        yield Problem("no-cuda-provider", "onnxruntime is the one for CPUs", lost, cure, note=True)
    if _works(torch) and torch.facts.get("cuda") is None:
        lost = "plans with --pooling kernel can't run on the GPU"
        cure = "pip uninstall -y torch && pip install torch"
        yield Problem("torch-for-cpus", f"torch {torch.version} is made for CPUs", lost, cure, note=True)


def _works(package: Package) -> bool:
    return package.version is not None and package.error is None


def _mismatches(machine: Machine, packages: Packages) -> Iterator[Problem]:
    bindings, triton = packages["cuda-bindings"], packages["triton"]
    for trt in (packages["tensorrt"], packages["tensorrt_rtx"]):
        if bindings.cuda and trt.cuda and bindings.cuda != trt.cuda:
            what = f"cuda-bindings is made for CUDA {bindings.cuda}, {trt.name} for CUDA {trt.cuda}"
            cure = f"pip install 'cuda-bindings>={trt.cuda},<{trt.cuda + 1}'"
            yield Problem("cuda-bindings-differ", what, "two versions of CUDA in one process", cure, note=True)
    wanted = packages.torch_triton
    if wanted and triton.version and triton.version != wanted:
        what = f"triton is {triton.version}, torch {packages['torch'].version} wants {wanted}"
        yield Problem("triton-differs", what, "torch.compile may fail", f"pip install triton=={wanted}", note=True)
