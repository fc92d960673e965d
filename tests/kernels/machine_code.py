"""Read what a compiled Triton kernel does from its machine code, and find what it must not do."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

# 65536 registers / (128 x 256 threads) = 2 programs on a multiprocessor, each with a tile of loads
# (8 KB) or two under way. An H100 needs 18 KB to keep its memory busy (3350 GB/s x 700 ns / 132).
MAX_REGISTERS = 128
MIN_WIDE_LOADS = 2  # those before the loop, and those in it


@dataclass(frozen=True)
class MachineCode:
    """The machine code of one kernel for one GPU."""

    loads: Counter[int]  # bits of a global load -> how many such instructions
    registers: int
    stack_bytes: int
    spills: int
    narrow_offsets: tuple[str, ...]  # address arithmetic in fewer than 64 bits


def read(kernel: Any) -> MachineCode:
    """Read a compiled kernel: from PTX and cubin on NVIDIA, from the assembly on AMD."""
    asm = kernel.asm
    facts = _read_amd(asm["amdgcn"]) if "amdgcn" in asm else _read_nvidia(asm["cubin"], asm["ptx"])
    return MachineCode(*facts, narrow_offsets=tuple(_narrow_offsets(asm["ttir"])))


def problems(code: MachineCode, *, other_loads: frozenset[int] = frozenset()) -> list[str]:
    """List what is wrong with a kernel that should read hidden states 128 bits at a time.

    `other_loads` are the widths that masks and spans are read with; anything else must be the
    hidden states.
    """
    found = []
    if code.loads[128] < MIN_WIDE_LOADS:
        found.append(f"only {code.loads[128]} loads of 128 bits")
    if narrow := set(code.loads) - {128} - other_loads:
        found.append(f"loads of {sorted(narrow)} bits")
    if code.stack_bytes or code.spills:
        found.append(f"{code.stack_bytes} bytes of stack, {code.spills} spills")
    if code.registers > MAX_REGISTERS:
        found.append(f"{code.registers} registers")
    found += [f"32-bit offset: {line}" for line in code.narrow_offsets]
    return found


def _read_nvidia(cubin: bytes, ptx: str) -> tuple[Counter[int], int, int, int]:
    usage = _tool("cuobjdump", "-res-usage", cubin)
    resources = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert resources, usage
    registers, stack, local = map(int, resources.groups())
    return ptx_loads(ptx), registers, stack, local  # what does not fit into registers is spilled to the stack


def ptx_loads(ptx: str) -> Counter[int]:
    """`ld.global.v4.b32` is a load of 128 bits."""
    found = re.findall(r"\bld\.global(?:\.v(\d))?\.[bfsu](\d+)", ptx)
    return Counter(int(count or 1) * int(bits) for count, bits in found)


def sass_loads(cubin: bytes) -> Counter[int]:
    """`LDG.E.128` is a load of 128 bits; without a width it is 32. Slower to get than PTX."""
    found = re.findall(r"\bLDG((?:\.\w+)*)", _tool("nvdisasm", "-c", cubin))
    widths = [re.search(r"\.[US]?(8|16|64|128|256)\b", suffixes) for suffixes in found]
    return Counter(int(width.group(1)) if width else 32 for width in widths)


def _tool(name: str, option: str, cubin: bytes) -> str:
    """Run one of the CUDA tools that come with Triton."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout


_AMD_BITS = {
    "dwordx4": 128,
    "dwordx3": 96,
    "dwordx2": 64,
    "dword": 32,
    "ushort": 16,
    "sshort": 16,
    "ubyte": 8,
    "sbyte": 8,
}


def _read_amd(assembly: str) -> tuple[Counter[int], int, int, int]:
    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        assert found, key
        return int(found.group(1))

    # A 16-bit load into half a register: buffer_load_short_d16, ..._d16_hi.
    kinds = [
        kind.removesuffix("_d16_hi").removesuffix("_d16")
        for kind in re.findall(r"(?:global|buffer)_load_(\w+)", assembly)
    ]
    loads = Counter(_AMD_BITS.get(kind, 16 if "short" in kind else 8) for kind in kinds)
    spills = number("vgpr_spill_count") + number("sgpr_spill_count")
    return loads, number("vgpr_count"), number("private_segment_fixed_size"), spills


def _narrow_offsets(ttir: str) -> list[str]:
    """Lines of Triton's IR that add a narrow number to a pointer, or multiply in 32 bits."""
    lines = [line.split(" loc(")[0].strip() for line in ttir.splitlines()]
    adds = [line for line in lines if "tt.addptr" in line and not re.search(r"\bi64$|xi64>$", line)]
    return adds + [line for line in lines if "arith.muli" in line and re.search(r"\bi32$|xi32>$", line)]
