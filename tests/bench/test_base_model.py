"""A checkpoint with other sizes and random weights is a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sbert_infer.bench.base_model import BASE, write_base_model
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.reference.encoder import load_reference


def test_sizes(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    sizes = {**BASE, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 64}
    write_base_model(make_checkpoint(), tmp_path / "random-weights", sizes)
    reference = load_reference(read_checkpoint(tmp_path / "random-weights"))
    assert (reference.checkpoint.name, reference.layers) == ("random-weights", 3)
    assert reference.encode(["a cat", "a dog"]).shape == (2, 48)
