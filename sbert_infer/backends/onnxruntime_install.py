"""The two packages of onnxruntime, which are installed into the same folder.

`onnxruntime` is for CPUs, `onnxruntime-gpu` for both. If both are installed, the one that came last
has overwritten files of the other; if one of them is then uninstalled, the folder is nearly empty.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from typing import Any

from sbert_infer.backends.tensorrt.cuda_packages import driver_too_old, version
from sbert_infer.errors import EngineError

BOTH = "onnxruntime and onnxruntime-gpu are both installed, into the same folder"
REINSTALL_GPU = "pip install --force-reinstall --no-deps onnxruntime-gpu"
CUDA_PROVIDER = "CUDAExecutionProvider"

logger = logging.getLogger(__name__)


def installed_packages() -> list[str]:
    """Return which of the two packages are installed."""
    return [name for name in ("onnxruntime", "onnxruntime-gpu") if version(name)]


def broken(what: str) -> str:
    """Return `what` is wrong with the installed onnxruntime, and the command that repairs it."""
    there = installed_packages()
    if len(there) == 2:
        return f"the installed onnxruntime is broken ({what}), because {BOTH}: {REINSTALL_GPU}"
    name = there[0] if there else "onnxruntime"
    return f"the installed onnxruntime is broken ({what}): pip install --force-reinstall --no-deps {name}"


def no_cuda_provider() -> str:
    """Return why the installed onnxruntime has no CUDA provider, and the command that adds it."""
    there = installed_packages()
    if len(there) == 2:
        return f"{BOTH}, and the one without CUDA came last: {REINSTALL_GPU}"
    if there == ["onnxruntime-gpu"]:
        return f"the installed onnxruntime-gpu has lost its CUDA provider: {REINSTALL_GPU}"
    fix = "pip uninstall -y onnxruntime && pip install 'sbert-infer[gpu]'"
    return f"the installed onnxruntime has no CUDA provider: {fix}"


def require_cuda(onnxruntime: Any) -> None:
    """Raise, naming the cure, unless the CUDA provider is installed and the driver can run it."""
    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        raise EngineError(no_cuda_provider())
    if problem := driver_too_old("onnxruntime-gpu"):
        raise EngineError(problem)


@functools.cache
def preload_cuda(onnxruntime: Any) -> str:
    """Load CUDA and cuDNN from pip's packages, once for each process; return what went wrong.

    onnxruntime by itself finds only those in the system's folders. It prints what it does not find,
    which is kept from the user's output.
    """
    preload = getattr(onnxruntime, "preload_dlls", None)  # since 1.21
    if preload is None:
        return ""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        preload()
    words = " ".join(printed.getvalue().split())
    logger.debug("preload_dlls: %s", words)
    return words


def not_started(onnxruntime: Any, gpu: int) -> str:
    """Return that the CUDA provider did not start on a GPU, why if it is known, and what to do."""
    why = preload_cuda(onnxruntime) or "are CUDA and cuDNN of the versions that it needs?"
    fix = "pip install 'onnxruntime-gpu[cuda,cudnn]'"
    return f"onnxruntime {onnxruntime.__version__} can't use cuda:{gpu}, its CUDA provider did not start ({why}): {fix}"
