"""The recent past of some metrics, kept so that the live page shows it from the first moment."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections import deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry

from sbert_infer.serve.wire.schemas import PastMetrics, PastValues, Series

_EVERY_S = 5.0
_MOST = 181  # a quarter of an hour
# How the names begin of what the page plots. The cache may be missing.
_KEPT = (
    "process_cpu_seconds",
    "process_resident_memory",
    "process_start_time",
    "sbert_batch",
    "sbert_cache",
    "sbert_class_seconds_bucket",
    "sbert_errors",
    "sbert_http_connections",
    "sbert_http_requests",
    "sbert_max_batch_tokens",
    "sbert_padded_tokens",
    "sbert_queue",
    "sbert_ready",
    "sbert_requests",
    "sbert_stage_seconds_bucket",
    "sbert_texts",
    "sbert_tokens",
)
_Key = tuple[str, tuple[tuple[str, str], ...]]  # the name of a series and its labels


class History:
    """A ring of samples: 8 bytes for each series that is kept, every few seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._columns: dict[_Key, int] = {}  # the place of each series in a row
        self._rows: deque[tuple[float, array[float]]] = deque(maxlen=_MOST)

    async def keep(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.take()
            await asyncio.sleep(_EVERY_S)

    def take(self) -> None:
        """Take a sample now."""
        found = {self._columns.setdefault(key, len(self._columns)): value for key, value in self._values()}
        row = array("d", [found.get(column, math.nan) for column in range(len(self._columns))])
        self._rows.append((time.monotonic(), row))

    def read(self) -> PastMetrics:
        """All samples, the oldest first."""
        now = time.monotonic()
        return PastMetrics(
            series=[Series(name, dict(labels)) for name, labels in self._columns],
            samples=[
                PastValues(round(now - taken, 3), [None if math.isnan(x) else x for x in row])
                for taken, row in self._rows
            ],
        )

    def _values(self) -> Iterator[tuple[_Key, float]]:
        for family in self._registry.collect():
            for name, labels, value, *_ in family.samples:
                plotted = "le" not in labels or "class" in labels or labels.get("stage") == "total"
                if name.startswith(_KEPT) and plotted:
                    yield (name, tuple(labels.items())), value
