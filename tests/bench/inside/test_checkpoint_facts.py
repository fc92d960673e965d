"""Facts about a checkpoint that need torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sbert_infer.bench.inside.checkpoint_facts import flops_polynomial


def test_flops_of_bert_are_those_counted_by_hand(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint("bert")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    width, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    constant, linear, square = flops_polynomial({"checkpoint": str(folder), "pairs": False})
    # Per token and layer: Q, K, V and the output are width x width each, the feed-forward is width
    # x inner twice.
    assert linear == pytest.approx(layers * 2 * (4 * width**2 + 2 * width * inner), rel=1e-6)
    # Per pair of tokens and layer: the scores and the weighted sum take width multiplications each.
    assert square == pytest.approx(layers * 2 * 2 * width, rel=1e-6)
    assert constant == pytest.approx(2 * width**2, rel=0.01, abs=1)  # BERT's own pooler
