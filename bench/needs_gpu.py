"""Exit with one line unless there is an NVIDIA GPU.

The Makefile runs this file, with any Python, before it makes an environment: it imports nothing.
"""

from __future__ import annotations

import ctypes
import sys


def gpu_problem() -> str | None:
    """Return why there is no GPU to use; None if there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver"
    count = ctypes.c_int()
    if code := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"the NVIDIA driver does not start (error {code})"
    return None if count.value else "the NVIDIA driver sees none"


if __name__ == "__main__":
    problem = gpu_problem()
    sys.exit(f"no GPU: {problem}" if problem else 0)
