"""Tiles: how much of the hidden states one program of the pooling kernels works on at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

__all__ = ["CHUNK_TOKENS", "Split", "Tiles", "pick_split", "pick_tiles"]

# Tokens are added up in chunks of this many. A constant, for the order of the additions must not
# depend on the batch. Most sentences are one chunk, so one launch pools them; a long one gives work
# to several programs.
CHUNK_TOKENS = 128

_MAX_BLOCK_HIDDEN = 1024
_MAX_WARPS = 8
_LOADS_PER_THREAD = 2
_MIN_ELEMENTS_PER_THREAD = 8  # narrow loads take more of them to keep memory busy
_WARP = 32
_VECTOR_BYTES = 16  # the widest load of one thread
_MAX_CHUNKS = 65535  # CUDA's limit of the grid's third dimension


@dataclass(frozen=True)
class Tiles:
    """What one program reads at once, `block_tokens` x `block_hidden` elements, and how."""

    block_tokens: int
    block_hidden: int
    vector: int  # elements that one aligned load may take
    num_warps: int


def pick_tiles(hidden: torch.Tensor) -> Tiles:
    """Tiles for hidden states [..., tokens, hidden], by width, type and strides; never by the batch.

    A tile is two loads for each thread, of 128 bits where strides allow: 8 KB for a program of 8
    warps, and the next tile is loaded while one is added. Registers allow for two programs on a
    multiprocessor or more, so at least 16 to 32 KB are under way. An A100 needs about 11 KB to keep
    its memory busy (2039 GB/s x 600 ns / 108), an H100 18 KB. A program holds a whole row of up to
    1024 columns, so that it can normalise it; lanes beyond the row (384 of 512 are in it) load
    nothing. Wider rows are cut into blocks of columns.
    """
    vector = _vector(hidden)
    block_hidden = min(_power_of_two(hidden.shape[-1]), _MAX_BLOCK_HIDDEN)
    warp_elements = _WARP * max(_LOADS_PER_THREAD * vector, _MIN_ELEMENTS_PER_THREAD)
    num_warps = min(_MAX_WARPS, max(1, CHUNK_TOKENS * block_hidden // warp_elements))
    block_tokens = min(CHUNK_TOKENS, max(1, num_warps * warp_elements // block_hidden))
    return Tiles(block_tokens, block_hidden, vector, num_warps)


@dataclass(frozen=True)
class Split:
    """How a launch is shared out: `grid` is (rows, blocks of columns, chunks of tokens)."""

    grid: tuple[int, int, int]
    combine: bool  # a second kernel finishes the rows


def pick_split(
    rows: int, width: int, longest: int | None, tiles: Tiles, *, normalize: bool, multiprocessors: int
) -> Split:
    """Rows are split over tokens only where there are too few of them to keep the device busy.

    With two programs per multiprocessor or more, each walks its whole row and finishes it: one
    launch. With fewer, each takes one chunk, and a second small kernel adds the chunks; the hidden
    states are still read once. `longest` is the number of tokens of the longest row. If it is not
    known rows are not split; if a row is longer, its last program takes the rest.
    """
    blocks = -(-width // tiles.block_hidden)
    chunks = 1
    if longest is not None and rows * blocks < 2 * multiprocessors:
        chunks = min(max(1, -(-longest // CHUNK_TOKENS)), _MAX_CHUNKS)
    return Split((rows, blocks, chunks), combine=chunks > 1 or (normalize and blocks > 1))


def _vector(hidden: torch.Tensor) -> int:
    """Elements in the widest load that all strides allow: 16 bytes, or a power of two below."""
    if hidden.stride(-1) != 1 or hidden.data_ptr() % _VECTOR_BYTES:
        return 1
    # The stride of a dimension of size 1 is never taken.
    strides = [stride for size, stride in zip(hidden.shape[:-1], hidden.stride()[:-1], strict=True) if size > 1]
    return gcd(_VECTOR_BYTES // hidden.element_size(), *strides)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
