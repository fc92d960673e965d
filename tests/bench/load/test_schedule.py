"""Levels, arrivals and the order of requests: pure functions, repeatable by seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.bench.errors import BenchError
from sbert_infer.bench.load.schedule import group_texts, parse_levels, parse_sizes, poisson_arrivals, request_order
from sbert_infer.bench.load.target import is_url, parse_target

rates = st.floats(0.1, 500)
durations = st.floats(0.1, 20)
seeds = st.integers(0, 2**32)


@given(rates, durations, seeds)
def test_arrivals_are_in_order_within_the_turn_and_repeatable(rate: float, duration: float, seed: int) -> None:
    times = poisson_arrivals(rate, duration, seed)
    assert np.all(np.diff(times) >= 0)
    assert np.all((times >= 0) & (times < duration))
    assert np.array_equal(times, poisson_arrivals(rate, duration, seed))
    expected = rate * duration
    assert abs(len(times) - expected) < 8 * np.sqrt(expected) + 8  # of a Poisson distribution


def test_arrivals_are_random_and_independent_of_each_other() -> None:
    gaps = np.diff(poisson_arrivals(200, 50, 0))
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # as in an exponential distribution
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.05
    assert not np.array_equal(poisson_arrivals(5, 9, 1), poisson_arrivals(5, 9, 2))


@given(st.integers(1, 50), st.integers(0, 200), seeds)
def test_every_request_is_sent_before_one_is_sent_again(requests: int, count: int, seed: int) -> None:
    order = request_order(requests, count, seed)
    assert len(order) == count
    for start in range(0, count, requests):
        part = order[start : start + requests]
        assert len(set(part)) == len(part)
        assert set(part) <= set(range(requests))
    assert np.array_equal(order, request_order(requests, count, seed))


@given(st.integers(1, 200), st.tuples(st.integers(1, 9), st.integers(0, 9)), seeds)
def test_every_text_is_in_one_request(count: int, sizes: tuple[int, int], seed: int) -> None:
    low, high = sizes[0], sum(sizes)
    groups = group_texts(count, (low, high), seed)
    assert sorted(row for group in groups for row in group) == list(range(count))
    assert all(low <= len(group) <= high for group in groups[:-1])
    assert 1 <= len(groups[-1]) <= high


def test_levels_are_shares_or_requests_per_second() -> None:
    assert [level.requests_per_s(200) for level in parse_levels("10%, 5x,42.5")] == [20, 1000, 42.5]


@pytest.mark.parametrize("text", ["", "0%", "fast", "10%,,20%", "-5", "10%,10%", "1e3"])
def test_other_levels_are_refused(text: str) -> None:
    with pytest.raises(BenchError, match="--rates"):
        parse_levels(text)


def test_sizes_are_a_number_or_a_range() -> None:
    assert (parse_sizes("8"), parse_sizes("1-32")) == ((8, 8), (1, 32))
    for text in ("0", "5-2", "", "a", "1-"):
        with pytest.raises(BenchError, match="--inputs-per-request"):
            parse_sizes(text)


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1:8080", "http://127.0.0.1:8080/v1/embeddings"),
        ("a b=https://host/api/v2/", "a b", "https://host/api/v2/embeddings"),
        ("http://host/embeddings", "host", "http://host/embeddings"),
        ("http://[::1]:80/v1", "[::1]:80", "http://[::1]:80/v1/embeddings"),
    ],
)
def test_a_url_is_a_base_url_as_for_openai_clients(text: str, name: str, url: str) -> None:
    assert is_url(text)
    target = parse_target(text)
    assert (target.name, target.url) == (name, url)


@pytest.mark.parametrize("text", ["http://", "http://host:port", "x=http:///v1"])
def test_a_bad_url_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="is not a URL"):
        parse_target(text)


def test_a_model_is_not_a_url() -> None:
    assert not any(map(is_url, ["model.onnx", "org/model", "folder=/x", "./http"]))
