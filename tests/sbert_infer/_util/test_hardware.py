"""The CPU's name and instructions, and the container's memory, from Linux's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from sbert_infer._util import hardware
from sbert_infer._util.hardware import cpu_name, instruction_sets, memory_limit

XEON = """processor\t: 0
model name\t: A Xeon
flags\t\t: fpu avx2 avx512f avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8

processor\t: 1
model name\t: Another
flags\t\t: fpu
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp sve i8mm bf16\n"


def test_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "x86").write_text(XEON)
    (tmp_path / "arm").write_text(ARM)
    assert cpu_name(tmp_path / "x86") == "A Xeon"
    assert instruction_sets(tmp_path / "x86") == [
        *("AVX2", "AVX-512", "AVX-512 VNNI", "AVX-512 BF16", "AMX INT8", "AMX BF16")
    ]
    assert instruction_sets(tmp_path / "arm") == ["NEON dot product", "I8MM", "BF16", "SVE"]
    assert instruction_sets(tmp_path / "nowhere") == []
    assert cpu_name(tmp_path / "nowhere")


def test_the_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 8 * 2**30)
    assert memory_limit(tmp_path) is None
    for content, limit in [("max\n", None), (f"{2**30}\n", 2**30), (f"{2**62}\n", None)]:
        (tmp_path / "memory.max").write_text(content)
        assert memory_limit(tmp_path) == limit
