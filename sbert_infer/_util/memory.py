"""Memory that was freed, and that the C library still holds."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Give freed memory back to the system.

    glibc keeps it for the threads that had it. An engine has threads of its own, so that each one
    that is opened and closed would leave its memory behind, a third of a model's.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries than glibc have none
    if trim is not None:
        trim(0)
