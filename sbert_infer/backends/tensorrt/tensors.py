"""The inputs of a model of packed rows, by name, and their shapes. All are int64."""

from __future__ import annotations

from sbert_infer.backends.base import Batch, Ids
from sbert_infer.types import Shape

POSITIONS = "position_ids"  # the only input that a model may lack
SPANS = ("starts", "ends")  # [rows, segments]
INPUTS = ("input_ids", "segment_ids", POSITIONS, *SPANS)  # all others are [rows, length]


def input_shape(name: str, shape: Shape) -> tuple[int, int]:
    """Return the shape of the input `name` when rows of `shape` run."""
    return shape.rows, shape.segments if name in SPANS else shape.length


def packed_inputs(batch: Batch) -> dict[str, Ids]:
    """Return the arrays of a packed batch by the names of the model's inputs."""
    packing = batch.packing
    assert packing is not None  # noqa: S101  # whoever runs packed rows makes or checks it
    return dict(
        zip(INPUTS, (batch.ids, packing.segments, packing.positions, packing.starts, packing.ends), strict=True)
    )
