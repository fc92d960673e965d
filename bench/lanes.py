"""`python -m sbert_infer.bench.lanes URL`: short queries beside bulk requests, on one server.

In each round, queries arrive at random; then clients send large requests as fast as they get
responses; then both at once. Latency counts from when a query was due. The texts of a round are
sent in another order in the next, and vectors are not checked: for that there is `sbert-bench
--serve`. What is printed compares both with each alone; the client shares the machine's cores.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import click

from sbert_infer.bench.errors import BenchError
from sbert_infer.bench.load.client import Exchange, LoadClient, run_loop
from sbert_infer.bench.load.schedule import poisson_arrivals, request_order
from sbert_infer.bench.load.target import Target, parse_target
from sbert_infer.bench.stats import percentiles
from sbert_infer.bench.workloads import make_workload

_QUERIES = 256  # different ones
_TIMEOUT_S = 60.0
_LONGEST_S = 600.0  # of all rounds: a load test must end


@dataclass(frozen=True)
class _Settings:
    rate: float
    clients: int
    texts: int
    seconds: float


@dataclass
class _Found:
    """What was measured in all rounds, alone and together."""

    lone_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    alone_texts_per_s: list[float] = field(default_factory=list)
    together_texts_per_s: list[float] = field(default_factory=list)
    failed: int = 0


@click.command()
@click.argument("url")
@click.option("--rate", type=click.FloatRange(0.1, 1000), default=20.0, help="Queries per second. [20]")
@click.option("--clients", type=click.IntRange(1, 64), default=3, help="Clients that send bulk requests. [3]")
@click.option("--texts", type=click.IntRange(2, 2048), default=256, help="Texts in a bulk request. [256]")
@click.option("--duration", "seconds", type=click.FloatRange(0.1, 60), default=8.0, help="Seconds of each turn. [8]")
@click.option("--rounds", type=click.IntRange(1, 20), default=3, help="[3]")
@click.option("--api-key", default="", envvar="OPENAI_API_KEY", help="Sent with every request.")
def main(url: str, rounds: int, api_key: str, **options: float) -> None:
    """Measure what bulk requests cost short queries at URL, and what those cost bulk."""
    try:
        settings = _Settings(**options)  # type: ignore[arg-type]  # click has converted them
        if 3 * rounds * settings.seconds > _LONGEST_S:
            raise BenchError(f"{rounds} rounds take more than {_LONGEST_S:g} s: fewer, or a shorter --duration")
        target = replace(parse_target(url), api_key=api_key)
        target.wait(0)
        found = measure(replace(target, model=target.first_model()), settings, rounds)
    except BenchError as error:
        raise click.ClickException(str(error)) from None
    for line in lines(found):
        click.echo(line)


def measure(target: Target, settings: _Settings, rounds: int) -> _Found:
    """Run the rounds, after a short one that does not count."""
    queries = [target.request([text], "base64") for text in make_workload("short", _QUERIES)]
    texts = make_workload("medium", 8 * settings.texts)
    bulk = [
        target.request(texts[start : start + settings.texts], "base64")
        for start in range(0, len(texts), settings.texts)
    ]
    _round(target, queries, bulk, replace(settings, seconds=min(1.0, settings.seconds)), 0, _Found())
    found = _Found()
    for number in range(1, rounds + 1):
        _round(target, queries, bulk, settings, number, found)
    if not (found.lone_ms and found.beside_ms and all(found.alone_texts_per_s)):
        raise BenchError(f"{target.url} responded with errors only, {found.failed} times: see its log")
    return found


def lines(found: _Found) -> list[str]:
    """Return what was found, to be printed."""
    lone, beside = percentiles(found.lone_ms), percentiles(found.beside_ms)
    shares = [
        together / alone for together, alone in zip(found.together_texts_per_s, found.alone_texts_per_s, strict=True)
    ]
    alone, together = median(found.alone_texts_per_s), median(found.together_texts_per_s)
    return [
        *(
            f"queries {rank}: {lone[rank]:.1f} ms alone, {beside[rank]:.1f} ms beside bulk, "
            f"{beside[rank] / lone[rank]:.1f} times"
            for rank in ("p50", "p99")
        ),
        f"bulk: {alone:.0f} texts/s alone, {together:.0f} beside queries, {median(shares):.0%} (median of the rounds)",
        f"{len(found.lone_ms)} and {len(found.beside_ms)} queries, {found.failed} requests failed",
    ]


def _round(
    target: Target, queries: list[bytes], bulk: list[bytes], settings: _Settings, number: int, found: _Found
) -> None:
    arrivals = poisson_arrivals(settings.rate, settings.seconds, number).tolist()
    order = request_order(len(queries), len(arrivals), number).tolist()

    async def ask() -> list[Exchange]:
        return await LoadClient(target, queries, _TIMEOUT_S).open_loop(arrivals, order, 4)

    async def load() -> list[Exchange]:
        requests = itertools.cycle(request_order(len(bulk), len(bulk), number).tolist())
        return await LoadClient(target, bulk, _TIMEOUT_S).closed_loop(settings.clients, requests, settings.seconds)

    async def both() -> tuple[list[Exchange], list[Exchange]]:
        asked, loaded = await asyncio.gather(ask(), load())
        return asked, loaded

    lone, alone = run_loop(ask()), run_loop(load())
    beside, together = run_loop(both())
    found.lone_ms += _latencies_ms(lone)
    found.beside_ms += _latencies_ms(beside)
    found.alone_texts_per_s.append(_texts_per_s(alone, settings.texts))
    found.together_texts_per_s.append(_texts_per_s(together, settings.texts))
    found.failed += sum(one.status != 200 for one in (*lone, *alone, *beside, *together))


def _latencies_ms(exchanges: Sequence[Exchange]) -> list[float]:
    return [1e3 * one.latency_s for one in exchanges if one.status == 200]


def _texts_per_s(exchanges: Sequence[Exchange], texts: int) -> float:
    """Return the texts of all responses over the time until the last."""
    done = [one.done for one in exchanges if one.status == 200]
    return len(done) * texts / (max(done) - exchanges[0].due) if done else 0.0


if __name__ == "__main__":
    main()
