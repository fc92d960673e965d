"""The schedule inside a TensorRT-RTX engine: which kernels are launched, in each profile.

A serialized engine holds it as text, one section for each optimization profile; no GPU is needed to
read it. The format is not documented, so a reader that finds no schedule raises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TEXT = re.compile(rb"[\t\n -~]{8,}")
# A section starts with its properties, has its launches after a label, and ends with `shape_main`.
# What follows are the kernels' own sources.
_SECTION = re.compile(r"^  stream_capturable=(\d)$(.*?)^ label \w+: ?$(.*?)^shape_main \{", re.MULTILINE | re.DOTALL)
_LAUNCH = re.compile(r'^  \w+=\{ name="?([^"\s]+)', re.MULTILINE)


@dataclass(frozen=True)
class Schedule:
    """What one profile launches, in order."""

    kernels: tuple[str, ...]
    capturable: bool  # as a CUDA graph

    @property
    def launches(self) -> int:
        """Number of kernels and matrix products in one pass."""
        return len(self.kernels)

    @property
    def fused_attentions(self) -> int:
        """Kernels that do all of an attention: both products and the softmax between them."""
        return sum(name.startswith("_gemm_mha_v2") for name in self.kernels)

    @property
    def softmaxes(self) -> int:
        """Kernels that do a softmax: attentions that were not fused."""
        return sum("ExpSum" in name for name in self.kernels)


def read_schedules(engine: bytes) -> list[Schedule]:
    """Return the schedule of each optimization profile of a serialized engine."""
    text = "\n".join(match.group().decode() for match in _TEXT.finditer(engine))
    found = [
        Schedule(tuple(_LAUNCH.findall(launches)), capturable == "1")
        for capturable, _, launches in _SECTION.findall(text)
    ]
    if not found or not all(schedule.kernels for schedule in found):
        raise ValueError("no schedule was found in the engine: has TensorRT-RTX changed how it writes it?")
    return found
