"""The packages that use a GPU, in versions that go together and that its driver can run."""

from __future__ import annotations

from collections.abc import Mapping

from sbert_infer.backends.tensorrt.cuda_packages import OLDEST_DRIVER
from sbert_infer.errors import EngineError

# CUDA -> pins. What torch requires of CUDA's libraries, onnxruntime-gpu finds and uses, too. On
# PyPI, the last versions for CUDA 12 are torch 2.10, with which cuda-bindings 12.9.4 and triton 3.6
# go, and onnxruntime-gpu 1.26. Newer ones than 1.23 of that need Python 3.11.
#
# The development environment has those that constraints.txt has, too: torch 2.13 (for CPUs), its
# triton, cuda-bindings 13.5 and tensorrt-rtx-cu13. The others are listed on PyPI, but neither list
# was installed as a whole: tensorrt-cu12, tensorrt-cu13, tensorrt-rtx-cu12, onnxruntime-gpu, and
# all else for CUDA 12 are not part of any environment that tests run in.
_PINS: Mapping[int, Mapping[str, str]] = {
    12: {
        "torch": "2.10.0",
        "triton": "3.6.0",
        "cuda-bindings": "12.9.4",
        "onnxruntime-gpu[cuda,cudnn]": "1.26.0",
        "tensorrt-cu12": "11.4.0.106",
        "tensorrt-rtx-cu12": "1.7.1.116",
    },
    13: {
        "torch": "2.13.0",
        "triton": "3.7.1",
        "cuda-bindings": "13.5.0",
        "onnxruntime-gpu[cuda,cudnn]": "1.31.1",
        "tensorrt-cu13": "11.4.0.106",
        "tensorrt-rtx-cu13": "1.7.1.116",
    },
}
_OLD_PYTHON = {"onnxruntime-gpu[cuda,cudnn]": "1.23.2"}  # for Python 3.10
_RTX_TARGETS = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")  # TensorRT for RTX leaves out sm90 and sm100
_OLDEST_TARGET = 75


def gpu_requirements(
    driver_cuda: tuple[int, int], target: str, system: str, processor: str, python: tuple[int, int]
) -> list[str]:
    """Return requirements for pip that make use of a GPU.

    Args:
        driver_cuda: the newest CUDA that the driver runs.
        target: the GPU's architecture, such as sm89.
        system: Linux, as `platform.system()` has it.
        processor: x86_64 or aarch64, as `platform.machine()` has it.
        python: the version of Python.

    """
    if system != "Linux" or processor not in ("x86_64", "aarch64"):
        raise EngineError(f"there is no list of GPU packages for {system} on {processor}: see docs/gpu.md")
    if int(target.removeprefix("sm")) < _OLDEST_TARGET:
        raise EngineError(f"{target} is older than sm{_OLDEST_TARGET}, the oldest GPU for which anything here is made")
    if driver_cuda[0] < min(_PINS):
        raise EngineError(f"the driver has CUDA {driver_cuda[0]}.{driver_cuda[1]}: update it to 580 or newer")
    # Python 3.10 has no onnxruntime-gpu for CUDA 13, and cuDNN can't be installed for both.
    major = min(driver_cuda[0], max(_PINS)) if python >= (3, 11) else 12
    if processor == "aarch64" and major == 12:
        need = f"driver {OLDEST_DRIVER[13]} or newer and Python 3.11 or newer"
        raise EngineError(f"torch and onnxruntime-gpu are made for GPUs on aarch64 with {need} only")
    pins = {**_PINS[major], **(_OLD_PYTHON if python < (3, 11) else {})}
    unfit = [name for name in pins if name.startswith("tensorrt-rtx") and target not in _RTX_TARGETS]
    return [f"{name}=={version}" for name, version in pins.items() if name not in unfit]
