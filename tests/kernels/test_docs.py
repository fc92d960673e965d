"""The figures in docs/kernels.md are those of its own formulas."""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"
MODELS = {"MiniLM-L6, 384": (6, 384), "BERT base, 768": (12, 768)}  # layers, hidden
GPUS = {"L4": (300e9, 121e12), "A100 80 GB": (2039e9, 312e12), "H100 SXM": (3350e9, 989e12)}  # bytes/s, FLOP/s
BATCH, LENGTH = 256, 128


def line(model: str, gpu: str) -> str:
    (layers, hidden), (bytes_per_s, flop_per_s) = MODELS[model], GPUS[gpu]
    tokens = BATCH * LENGTH
    forward = tokens * layers * (24 * hidden**2 + 4 * LENGTH * hidden) / (flop_per_s / 2)
    kernel = (tokens * (2 * hidden + 8) + BATCH * hidden * 4) / bytes_per_s
    eager = tokens * hidden * 6 / bytes_per_s
    cells = [model, gpu, f"{forward * 1e3:.1f}"]
    for pooling in (kernel, eager):
        cells += [f"{pooling * 1e6:.0f}", f"{pooling / (forward + pooling):.2%}"]
    return f"| {' | '.join(cells)} |"


def test_the_roofline() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    table = [text for text in lines if text.startswith(tuple(f"| {model}" for model in MODELS))]
    assert table == [line(model, gpu) for model in MODELS for gpu in GPUS]
