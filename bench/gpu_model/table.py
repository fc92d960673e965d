"""The table of forecasts, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sbert_infer.bench.gpu_model.forecast import BUSY, SLOTS, Work, cores_needed, forecast, lone_text_s
from sbert_infer.bench.gpu_model.host import HostCosts
from sbert_infer.bench.gpu_model.roofline import Gpu

HEAD = (
    "GPU",
    "model",
    "texts",
    "texts/s",
    "million tokens/s",
    "GPU busy",
    "limited by",
    "cores for {:.0%}",
    "one text",
)


def render(
    works: Sequence[tuple[str, Work]], gpus: Iterable[Gpu], host: HostCosts, cores: int, slots: int = SLOTS
) -> str:
    """Return the table for each GPU, model and kind of texts, with `cores` for tokenizing."""
    rows = [[cell.format(BUSY) for cell in HEAD], ["---"] * 3 + ["--:"] * 3 + ["---"] + ["--:"] * 2]
    rows += [_row(gpu, name, work, host, cores, slots) for gpu in gpus for name, work in works]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def assumptions(host: HostCosts, cores: int, slots: int) -> Iterator[str]:
    """Yield what the table was computed with, a line each."""
    yield f"{cores} cores for tokenizing, {host.tokenize_s * 1e6:.2f} us a token; {slots} slots"
    python = f"{host.collect_text_s * 1e6:.2f} us a text and {host.collect_s * 1e9:.0f} ns a token to collect ids"
    yield f"in Python: {python}, {host.plan_s * 1e6:.1f} us a row to plan batches"
    batch = f"{host.make_s * 1e9:.1f} ns a token to make it, {host.take_s * 1e9:.2f} ns a number to take its vectors"
    yield f"in Python, for a batch: {host.batch_s * 1e6:.0f} us, {batch}"
    pieces = f"in {host.pieces} pieces" if host.pieces > 1 else "whole"
    yield f"windows of texts are tokenized {pieces}"


def _row(gpu: Gpu, name: str, work: Work, host: HostCosts, cores: int, slots: int) -> list[str]:
    found, needed = forecast(work, gpu, host, cores, slots), cores_needed(work, gpu, host, slots)
    return [
        gpu.name,
        work.model.name,
        name,
        f"{_rounded(found.texts_per_s):,}",
        f"{found.tokens_per_s / 1e6:.2f}",
        f"{found.gpu_busy:.0%}",
        found.bottleneck,
        "none" if needed is None else str(needed),
        f"{lone_text_s(work.model, gpu, host) * 1e3:.1f} ms",
    ]


def _rounded(number: float) -> int:
    """Round to two digits: more would look as if it had been measured."""
    return int(float(f"{number:.1e}"))
