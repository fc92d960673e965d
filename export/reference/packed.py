"""The reference on packed rows: several texts in each row, each of them a segment.

`segment_ids` [rows, length] numbers the segments of a row from 1 on, and is 0 where nothing is.
`position_ids` counts the tokens of each segment from 0 on. `starts` and `ends` [rows, segments] are
the columns of what is pooled of each segment, the end exclusive. Both are 0 for a segment that does
not exist; its vector is what the modules after pooling make of zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sbert_infer.export.checkpoint.transformer import first_position
from sbert_infer.export.reference.encoder import Reference


class Segments:
    """Which tokens of the rows that are running belong together; attention reads it."""

    together: Tensor  # [rows, 1, length, length]: whether two tokens are of the same segment

    def set(self, segment_ids: Tensor) -> None:
        """Set the segments of the rows that run next."""
        self.together = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]


class PackedReference(nn.Module):
    """A reference that takes packed rows. Attention must heed `segments` (`graph/operators.py`).

    The tokens are rounded to `dtype`, of which pooling takes sums; what follows it is FP32.
    """

    def __init__(self, reference: Reference, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.reference, self.dtype = reference, dtype
        self.segments = Segments()
        self._first_position = first_position(reference.encoder.config)
        self._takes_positions = "position_ids" in inspect.signature(reference.encoder.forward).parameters

    def forward(
        self, input_ids: Tensor, segment_ids: Tensor, position_ids: Tensor, starts: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the vectors [rows, segments, dim] in FP32, and the token vectors."""
        self.segments.set(segment_ids)
        options = {"position_ids": self._places(input_ids, position_ids)} if self._takes_positions else {}
        mask = (segment_ids > 0).to(torch.int64)
        tokens = self.reference.token_vectors(input_ids, mask, **options).to(self.dtype)
        modes, longest = self.reference.checkpoint.pooling.modes, self.reference.checkpoint.max_length
        pooled = pool(modes, tokens, segment_ids, position_ids, starts, ends, longest)
        vectors: Tensor = self.reference.head(pooled.flatten(0, 1))  # as for a batch of texts
        return vectors.view(*starts.shape, -1), tokens

    def _places(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Positions as the transformer counts them.

        Where they start after the padding token's id, a text may contain that token, spelled out:
        it has its own id as position, and is not counted.
        """
        if not self._first_position:
            return position_ids
        pad = self._first_position - 1
        is_pad = input_ids == pad
        return torch.where(is_pad, pad, position_ids + self._first_position - count_before(is_pad, position_ids))


def count_before(marked: Tensor, position_ids: Tensor) -> Tensor:
    """For each token, how many of its segment before it are `marked` [rows, length].

    A sum along the row, less what it was at the segment's first column: comparing every token with
    every other would take memory with the square of the length.
    """
    ones = marked.to(torch.int32)
    before = ones.cumsum(dim=1, dtype=torch.int32) - ones
    first = torch.arange(marked.shape[1]) - position_ids
    return (before - before.gather(1, first)).to(torch.int64)


def pool(
    modes: Sequence[str],
    tokens: Tensor,
    segment_ids: Tensor,
    position_ids: Tensor,
    starts: Tensor,
    ends: Tensor,
    longest: int,
) -> Tensor:
    """[rows, length, width] -> [rows, segments, width * modes] in FP32.

    `longest` is the most tokens of a segment.
    """
    columns = torch.arange(tokens.shape[1])
    first, last = starts.unsqueeze(2), ends.unsqueeze(2) - 1
    inside = (columns >= first) & (columns <= last)  # [rows, segments, length]
    pooled = []
    for mode in modes:
        if mode == "max":
            highest = _running_max(tokens, segment_ids, inside.any(dim=1), longest)
            pooled.append(_weighted_mean(highest, inside & (columns == last)))
        elif mode == "cls":  # a text that is all prompt has its first token's vector, as if padded
            all_prompt = (first > last) & _begins(segment_ids, position_ids, starts)
            pooled.append(_weighted_mean(tokens, inside & (columns == first) | all_prompt))
        elif mode == "lasttoken":
            pooled.append(_weighted_mean(tokens, inside & (columns == last)))
        elif mode == "weightedmean":  # the first token of the text weighs 1, the second 2, and so on
            pooled.append(_weighted_mean(tokens, inside * (position_ids + 1).unsqueeze(1)))
        else:
            size = (ends - starts).unsqueeze(2).to(torch.float32)
            pooled.append(_weighted_mean(tokens, inside) * (size.sqrt() if mode == "mean_sqrt_len" else 1.0))
    return torch.cat(pooled, dim=-1)


def _begins(segment_ids: Tensor, position_ids: Tensor, starts: Tensor) -> Tensor:
    """Where each segment has its first token, [rows, segments, length]."""
    numbers = torch.arange(1, starts.shape[1] + 1).unsqueeze(1)
    return (segment_ids.unsqueeze(1) == numbers) & (position_ids.unsqueeze(1) == 0)


def _weighted_mean(tokens: Tensor, weights: Tensor) -> Tensor:
    """Mean of the tokens by integer `weights` [rows, segments, length], zero where all are zero.

    It is a product with the tokens' shares, in the type of the tokens: not every GPU has FP32
    products. Shares add up to 1, so the product does not overflow. They are rounded, so their sum
    is not quite 1, which the division corrects.
    """
    weights = weights.to(torch.float32)
    shares = (weights / weights.sum(dim=2, keepdim=True).clamp(min=1)).to(tokens.dtype)
    total = shares.to(torch.float32).sum(dim=2, keepdim=True)
    return (shares @ tokens).to(torch.float32) / total.clamp(min=1e-9)


def _running_max(tokens: Tensor, segment_ids: Tensor, kept: Tensor, limit: int) -> Tensor:
    """For each token the maximum over the kept tokens of its segment up to it.

    It takes log2(limit) steps, each of which doubles its reach: a maximum over each segment at once
    would compare every token with every segment of its row.
    """
    columns = torch.arange(tokens.shape[1])
    lowest = torch.finfo(tokens.dtype).min
    highest = tokens.masked_fill(~kept.unsqueeze(2), lowest)
    reach = 1
    while reach < limit:
        back = (columns - reach).clamp(min=0)
        same = (segment_ids.index_select(1, back) == segment_ids) & (columns >= reach)
        before = highest.index_select(1, back).masked_fill(~same.unsqueeze(2), lowest)
        highest = highest.maximum(before)
        reach *= 2
    return highest
