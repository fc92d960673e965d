"""The axes of plots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.bench.report.svg_parts import nice_ticks


@given(st.floats(1e-6, 1e9), st.floats(0, 0.99))
def test_ticks_enclose_the_range_and_are_few(high: float, share: float) -> None:
    ticks = nice_ticks(high, share * high)
    assert ticks[0] <= share * high * (1 + 1e-6)
    assert ticks[-1] >= high * (1 - 1e-6)
    assert 2 <= len(ticks) <= 8
