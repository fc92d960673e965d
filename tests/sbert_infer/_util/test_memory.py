"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from sbert_infer._util.memory import give_back

_BLOCKS, _BYTES = 50_000, 2000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_freed_memory_goes_back_to_the_system() -> None:
    c = ctypes.CDLL(None)
    c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [c.malloc(_BYTES) for _ in range(_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, _BYTES)
    for block in blocks[:-1]:  # the last one keeps the others below the heap's end
        c.free(block)
    before = resident_bytes()
    give_back()
    assert before - resident_bytes() > _BLOCKS * _BYTES / 2
    c.free(blocks[-1])


def test_a_system_without_glibc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    give_back()
