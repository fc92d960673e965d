"""The demo, on a model small enough for a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sbert_infer.bench import demo


@pytest.mark.filterwarnings("ignore::sbert_infer.SbertInferWarning")  # the small model's limit cuts some texts
def test_demo(make_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    demo.show(str(make_checkpoint("bert")), num_texts=12, rounds=1)
    out = capsys.readouterr().out
    assert out.count("parity   cosine min") == 2
    rows = [line for line in out.splitlines() if any(line.endswith(sentence) for sentence in demo.SENTENCES)]
    assert len(rows) == len(demo.SENTENCES)
    assert float(rows[0].split()[0]) == 1.0
    race = {line[2:20].strip(): line.split()[-3:] for line in out.splitlines() if line.endswith(tuple("0123456789"))}
    assert race["eager PyTorch"][1:] == ["1.00x", "1.000000"]
    assert race["sbert-infer"][2] == "1.000000"
    assert 0.98 < float(race["sbert-infer int8"][2]) < 1
