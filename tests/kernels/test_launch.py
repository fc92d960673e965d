"""How the kernels are launched: the size of a tile, and which rows are split among programs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")  # exists for Linux only

from sbert_infer.kernels.launch import CHUNK_TOKENS, pick_split, pick_tiles


def split(rows: int, length: int | None, width: int = 384, *, normalize: bool = True) -> tuple[tuple[int, ...], bool]:
    picked = pick_split(
        rows, width, length, pick_tiles(torch.zeros(1, 1, width)), normalize=normalize, multiprocessors=108
    )
    return picked.grid, picked.combine


def test_long_rows_are_split_only_where_rows_are_few() -> None:
    assert split(32, 512) == ((32, 1, 4), True)
    assert split(32, 513) == ((32, 1, 5), True)
    assert split(32, CHUNK_TOKENS) == ((32, 1, 1), False)
    assert split(216, 512) == ((216, 1, 1), False)
    assert split(32, None) == ((32, 1, 1), False)
    assert split(1, 10**8)[0] == (1, 1, 65535)  # as much as CUDA allows; the last program takes the rest


def test_wide_rows_take_a_second_step_only_for_unit_length() -> None:
    assert split(500, 64, 4096, normalize=False) == ((500, 4, 1), False)
    assert split(500, 64, 4096, normalize=True) == ((500, 4, 1), True)


def test_loads_are_as_wide_as_the_strides_allow() -> None:
    def vector(hidden: torch.Tensor) -> int:
        return pick_tiles(hidden).vector

    assert vector(torch.zeros(2, 3, 384, dtype=torch.float16)) == 8
    assert vector(torch.zeros(2, 3, 384)) == 4
    assert vector(torch.zeros(2, 3, 100, dtype=torch.float16)) == 4
    assert vector(torch.zeros(2, 3, 97, dtype=torch.float16)) == 1
    assert vector(torch.zeros(2, 384, 3, dtype=torch.float16).mT) == 1
    assert vector(torch.zeros(2 * 3 * 384 + 1, dtype=torch.float16)[1:].view(2, 3, 384)) == 1  # address not aligned
    assert vector(torch.zeros(3 * 384, dtype=torch.float16).as_strided((1, 3, 384), (7, 384, 1))) == 8


def test_the_order_of_additions_does_not_depend_on_the_batch() -> None:
    shapes = [(1, 1), (1, 512), (64, 7), (4096, 128)]
    assert len({pick_tiles(torch.empty(batch, length, 384, dtype=torch.float16)) for batch, length in shapes}) == 1


def test_packed_rows_are_split_only_where_texts_are_few() -> None:
    assert split(1, 512) == ((1, 1, 4), True)  # a lone text
    assert split(32, 90) == ((32, 1, 1), False)  # each a chunk
    assert split(32 * 40, 512) == ((1280, 1, 1), False)  # full rows: one launch
