"""One server's turns: requests are sent, and responses checked after the turn."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sbert_infer.bench.errors import BenchError
from sbert_infer.bench.load.client import Exchange, LoadClient, run_loop
from sbert_infer.bench.load.curve import recovery_time
from sbert_infer.bench.load.results import LONE, SATURATION, LoadRow, Turn, summarise
from sbert_infer.bench.load.schedule import Level, group_texts, parse_levels, poisson_arrivals, request_order
from sbert_infer.bench.load.target import Target, count_wrong, decode_response, memory_mb
from sbert_infer.bench.stats import percentiles

_OVERLOAD = 1.5  # share of the saturation from which on the recovery is watched
_WATCH_LOAD = 0.2  # share of the saturation, spaced evenly so that probes don't queue up
_USUAL = 2.0  # times the lone request's p99: slowest response that counts as normal
_CALM = 5  # sequential requests, of which most must be as fast as usual before a turn
_CALM_WAIT_S = 30.0
_TOO_LONG = (400, 413, 422)  # statuses with which servers refuse a text


@dataclass(frozen=True)
class LoadSettings:
    """How to load the servers."""

    levels: tuple[Level, ...] = parse_levels("10%,30%,50%,70%,90%,110%,5x")
    rounds: int = 3
    duration_s: float = 5.0  # per turn
    warm_up_s: float = 1.0  # at most as long as a turn
    watch_s: float = 10.0  # after an overload; a server may keep a lower limit for some time after it
    clients: int = 64  # that wait for responses, at saturation
    sizes: tuple[int, int] = (1, 1)  # texts in a request, from and to
    encoding_format: str = "base64"
    timeout_s: float = 10.0
    min_cosine: float = 0.99999
    p99_ms: float | None = None
    wait_s: float = 0.0  # for a server to start
    seed: int = 0


class LoadServer:
    """A server and its turns so far."""

    def __init__(self, target: Target, settings: LoadSettings) -> None:
        self.target = target
        self.turns: dict[str, list[Turn]] = {}
        self._settings = settings
        self._groups: list[tuple[int, ...]] = []
        self._requests: list[bytes] = []
        self._expected: npt.NDArray[np.float32] = np.empty((0, 0), np.float32)

    def introduce(self, texts: Sequence[str]) -> dict[int, npt.NDArray[np.float32]]:
        """Send each text alone; return the vectors of those not refused as too long."""
        requests = [self.target.request([text], self._settings.encoding_format) for text in texts]
        exchanges = self._closed(requests, 1, iter(range(len(requests))))
        vectors = {}
        for exchange in exchanges:
            if exchange.status == 200:
                decoded = decode_response(exchange.body)
                if decoded is None or len(decoded) != 1:
                    raise BenchError(f"{self.target.url} does not respond with embeddings as OpenAI does")
                vectors[exchange.request] = decoded[0]
            elif exchange.status not in _TOO_LONG:
                raise BenchError(f"{self.target.url}: {_reason(exchange)}")
        if not vectors:
            raise BenchError(f"{self.target.url} refuses every text: {_reason(exchanges[0])}")
        return vectors

    def prepare(self, texts: Sequence[str], expected: npt.NDArray[np.float32]) -> None:
        """Set the texts to send and the vectors to expect, and warm the server up."""
        settings = self._settings
        self._expected = expected
        self._groups = group_texts(len(texts), settings.sizes, settings.seed)
        self._requests = [
            self.target.request([texts[row] for row in group], settings.encoding_format) for group in self._groups
        ]
        self._closed(self._requests, settings.clients, self._endless(0), min(settings.warm_up_s, settings.duration_s))

    def closed_turn(self, level: str, number: int) -> None:
        """Run a turn with clients that wait for responses: one if `lone`, many at `saturation`."""
        clients = 1 if level == LONE else self._settings.clients
        cpu = time.process_time()
        exchanges = self._closed(self._requests, clients, self._endless(1 + number), self._settings.duration_s)
        turn = Turn(max(exchange.done for exchange in exchanges) - exchanges[0].due, len(exchanges), None)
        turn.generator_cpu_s = time.process_time() - cpu
        self._evaluate(exchanges, turn)
        self.turns.setdefault(level, []).append(turn)

    def open_turn(self, level: Level, number: int) -> None:
        """Run a turn with requests at random times; after an overload, watch the recovery."""
        duration_s, watch_s = self._settings.duration_s, self._settings.watch_s
        rate = level.requests_per_s(self.capacity)
        overload = rate >= _OVERLOAD * self.capacity
        seed = (self._settings.seed, number, round(1000 * level.value))
        arrivals = poisson_arrivals(rate, duration_s, seed)
        probes = np.arange(0, watch_s, 1 / (_WATCH_LOAD * self.capacity)) if overload else np.empty(0)
        cpu = time.process_time()
        times = [*arrivals.tolist(), *(duration_s + probes).tolist()]
        order = request_order(len(self._requests), len(times), seed).tolist()
        client = LoadClient(self.target, self._requests, self._settings.timeout_s)
        exchanges = run_loop(client.open_loop(times, order, self._settings.clients))
        cpu = time.process_time() - cpu
        start = exchanges[0].due - times[0] if exchanges else 0.0
        loaded, watched = exchanges[: len(arrivals)], exchanges[len(arrivals) :]
        last = max((exchange.done - start for exchange in loaded if exchange.status), default=0.0)
        turn = Turn(max(duration_s, last), len(loaded), len(loaded) / duration_s, generator_cpu_s=cpu)
        self._evaluate(loaded, turn)
        if overload:
            self._evaluate_recovery(watched, start, start + duration_s, turn)
        self.turns.setdefault(level.label, []).append(turn)

    @property
    def capacity(self) -> float:
        """Requests per second at saturation, in the current round."""
        row = summarise(self.target.name, SATURATION, self.turns[SATURATION][-1:])
        if not row.answered:
            reasons = ", ".join(row.errors) or "all refused"
            raise BenchError(f"{self.target.name} responded to none of {self._settings.clients} clients: {reasons}")
        return row.answered_per_s

    def rows(self) -> list[LoadRow]:
        """Summarise each level so far."""
        return [summarise(self.target.name, level, turns) for level, turns in self.turns.items()]

    @property
    def lone_p99_s(self) -> float | None:
        """99th percentile of a lone request; None before it was measured."""
        latencies = [value for turn in self.turns.get(LONE, []) for value in turn.latencies_ms]
        return percentiles(latencies)["p99"] / 1e3 if latencies else None

    @property
    def _usual_s(self) -> float:
        return _USUAL * (self.lone_p99_s or np.inf)

    def wait_until_calm(self) -> None:
        """Wait until lone requests show that the work of earlier turns is done."""
        end = time.perf_counter() + _CALM_WAIT_S
        while time.perf_counter() < end:
            exchanges = self._closed(self._requests, 1, itertools.islice(self._endless(0), _CALM))
            usual = sum(one.status == 200 and one.latency_s <= self._usual_s for one in exchanges)
            if usual > _CALM // 2:
                return

    def _closed(
        self, requests: Sequence[bytes], clients: int, order: Iterator[int], seconds: float | None = None
    ) -> list[Exchange]:
        client = LoadClient(self.target, requests, self._settings.timeout_s)
        return run_loop(client.closed_loop(clients, order, seconds))

    def _endless(self, number: int) -> Iterator[int]:
        count = len(self._requests)
        passes = (request_order(count, count, (self._settings.seed, number, place)) for place in itertools.count())
        return itertools.chain.from_iterable(one.tolist() for one in passes)

    def _evaluate(self, exchanges: Sequence[Exchange], turn: Turn) -> None:
        """Evaluate the exchanges of a turn."""
        for exchange in exchanges:
            turn.late_ms.append(1e3 * (exchange.sent - exchange.due) if exchange.sent else 0.0)
            if exchange.status == 200:
                turn.latencies_ms.append(1e3 * exchange.latency_s)
                wrong = self._count_wrong(exchange)
                turn.wrong_texts += wrong
                turn.right += not wrong
                turn.right_texts += len(self._groups[exchange.request]) - wrong
            elif exchange.status == 429:
                turn.refusals_ms.append(1e3 * exchange.latency_s)
            else:
                turn.errors[exchange.error or f"HTTP {exchange.status}"] += 1
        turn.memory_mb = memory_mb(self.target.pid) if self.target.pid else None

    def _evaluate_recovery(self, probes: Sequence[Exchange], start: float, end: float, turn: Turn) -> None:
        """Find out for how long after the `end` of an overload responses were slow."""
        wrong = {one: self._count_wrong(one) for one in probes if one.status == 200}
        turn.wrong_texts += sum(wrong.values())
        turn.right_beside = sum(not found for one, found in wrong.items() if one.done <= start + turn.seconds)
        times = [(one.due - end, one.latency_s if one.status == 200 else None) for one in probes]
        turn.recovery_s, turn.watched_s = recovery_time(times, self._usual_s), self._settings.watch_s

    def _count_wrong(self, exchange: Exchange) -> int:
        return count_wrong(exchange.body, self._groups[exchange.request], self._expected, self._settings.min_cosine)


def _reason(exchange: Exchange) -> str:
    """Say why a request failed, in the server's own words if there are any."""
    if exchange.error:
        return f"{exchange.error} (is it running?)" if exchange.error == "no connection" else exchange.error
    try:
        said = json.loads(exchange.body)["error"]
        said = said["message"] if isinstance(said, dict) else said
    except (ValueError, LookupError, TypeError):
        said = exchange.body.decode("utf-8", "replace")
    advice = "; set --api-key or OPENAI_API_KEY" if exchange.status in (401, 403) else ""
    return f"HTTP {exchange.status}: {' '.join(str(said).split())[:200]}{advice}"
