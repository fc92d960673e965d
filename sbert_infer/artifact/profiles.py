"""The shapes that a TensorRT engine is built for: a few length buckets, each with batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sbert_infer.text.batching import bucket_edges

# Lengths are rounded up to a multiple of this: tensor cores take FP16 operands in blocks of 8.
_LENGTH_MULTIPLE = 8
# Texts with fewer tokens than this are rare.
_SHORTEST_DEFAULT = 8


@dataclass(frozen=True)
class Profile:
    """One length bucket. Its texts are always padded to `length`, so only the batch size varies."""

    length: int  # tokens of the longest text in it: a bucket edge
    best_batch: int  # the batch size it is tuned for, in texts
    max_batch: int  # the largest batch size

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes that run, ascending.

        Other batches are padded to the next size, so that there are few shapes.

        >>> Profile(length=128, best_batch=20, max_batch=20).batches
        (1, 2, 4, 8, 16, 20)
        """
        powers = [1 << exponent for exponent in range(self.max_batch.bit_length())]
        return tuple(sorted({*powers, self.max_batch}))


def most_tokens(profiles: Sequence[Profile]) -> int:
    """Return the largest token budget, padding included, that fits every profile."""
    return min((profile.max_batch + 1) * profile.length - 1 for profile in profiles)


def make_profiles(
    lengths: npt.NDArray[np.int64] | None, longest: int, max_batch_tokens: int, count: int = 6
) -> tuple[Profile, ...]:
    """Return at most `count` buckets, up to `longest` tokens, that pad texts of `lengths` least.

    Without `lengths`, texts of 8 to 16 tokens are assumed to be as much work as those of 16 to 32,
    and so on: short texts are many, long ones are few. The resulting buckets waste about the same
    share of work at every length.

    >>> [profile.length for profile in make_profiles(None, longest=512, max_batch_tokens=8192)]
    [16, 32, 64, 136, 272, 512]
    >>> [(p.length, p.max_batch) for p in make_profiles(np.array([5, 6, 30]), 64, 1024, count=2)]
    [(8, 128), (64, 16)]
    """
    if max_batch_tokens < 1:
        raise ValueError(f"max_batch_tokens must be at least 1, got {max_batch_tokens}")
    if lengths is None:
        lengths = (1 / np.linspace(1 / min(_SHORTEST_DEFAULT, longest), 1 / longest, 1000)).round().astype(np.int64)
    lengths = np.clip(np.asarray(lengths, np.int64), 1, longest)  # longer texts are cut
    edges = bucket_edges(lengths, count, longest, _LENGTH_MULTIPLE)
    return tuple(_profile(edge, max_batch_tokens) for edge in edges)


def _profile(length: int, max_batch_tokens: int) -> Profile:
    """Return a profile tuned for its largest batch: batching fills batches to the token budget."""
    batch = max(1, max_batch_tokens // length)
    return Profile(length, best_batch=batch, max_batch=batch)
