"""The contract between runtime and backends: a batch goes in, named model outputs come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sbert_infer.text.packing import Packer

CLOSED = "the engine was closed during this call"

Array = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """Where the texts of a batch are, if a row may hold several: each is a segment of its row."""

    segments: Ids  # [rows, length]: number of the token's segment in its row, from 1; 0 for nothing
    positions: Ids  # [rows, length]: the token's place in its text, from 0
    starts: Ids  # [rows, segments]: column of the first token of each segment that is pooled
    ends: Ids  # [rows, segments]: column after its last; both are 0 for a segment that does not exist
    texts: Ids  # [texts]: the place of each text among all segments, row * segments + segment


@dataclass(frozen=True)
class Batch:
    """Texts that run together, padded to one length, or packed into rows."""

    ids: Ids  # [rows, length]
    mask: Ids  # [rows, length]: 1 for tokens that are attended to
    token_types: Ids | None = None  # [rows, length]: 1 for the second text of a pair; None: all 0
    prompt_length: int = 0  # leading tokens of every row that pooling leaves out
    packing: Packing | None = None  # None: each row is one text

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and length."""
        rows, length = self.ids.shape
        return rows, length


class Backend(Protocol):
    """Runs one batch at a time for each of `workers` threads; each run uses `threads` cores."""

    device: str  # cpu, cuda:0 or cuda:0,cuda:1
    workers: int
    spare_workers: int  # threads that may also run small, urgent batches, though the others are busy
    threads: int
    max_batch_tokens: int
    min_batch_tokens: int  # a small call is split among the workers into batches no smaller than this
    packer: Packer | None  # packs texts into the only shapes that can run; None: padded, in any shape
    length_multiple: int  # lengths that batches are best padded to
    outputs: tuple[str, ...]  # names of the graph's outputs that it can return

    def run(self, batch: Batch, outputs: Sequence[str], *, alone: bool = False) -> list[Array]:
        """Run a batch and return the `outputs` in that order, each [texts, ...].

        `alone` means that no other batch of this call runs at the same time.
        """
        ...

    def describe(self) -> str:
        """Return a short description of what runs and where."""
        ...

    def close(self) -> None:
        """Free the model. A second call does nothing."""
        ...
