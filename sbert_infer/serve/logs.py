"""Log lines, as text or JSON, written by a thread so that a stalled pipe holds up no request."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any

from sbert_infer._util.threads import in_daemon_thread

_MAX_LINES = 10_000  # that wait to be written; more are lost
_MAX_CHARACTERS = 4096  # of a message, so that these lines take some 40 MB at most
_TELL_EVERY_S = 1.0  # how many lines were lost
_FLUSH_S = 2.0  # to write what still waits at the end


class LostLines:
    """Counts lines that could not be written. Any thread may use it."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def count(self) -> None:
        """Count one more."""
        with self._lock:
            self.total += 1


lost_lines = LostLines()  # of this process, which has one standard error


@contextmanager
def logging_to_stderr(as_json: bool) -> Iterator[None]:
    """Within this context, all log records and warnings of this process go to standard error."""
    lines: SimpleQueue[logging.LogRecord | None] = SimpleQueue()
    writer = _Writer(lines, _JsonFormatter() if as_json else _TextFormatter())
    writer.start()
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    before = root.handlers[:], root.level, uvicorn.level
    root.handlers[:] = [_Handler(lines)]
    root.setLevel(logging.INFO)
    uvicorn.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers[:], root.level, uvicorn.level = before
        concurrent.futures.wait([in_daemon_thread("sbert-serve-log-end", writer.stop)], timeout=_FLUSH_S)


class _Handler(QueueHandler):
    """Puts records into the writer's queue, as long as there is room."""

    queue: SimpleQueue[Any]

    def enqueue(self, record: logging.LogRecord) -> None:
        """Leave a record to the writer, or lose it."""
        if self.queue.qsize() < _MAX_LINES:
            self.queue.put_nowait(record)
        else:
            lost_lines.count()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Format the message now, since its arguments may change. A request's record is final."""
        if hasattr(record, "record"):
            return record
        try:
            record = super().prepare(record)
        except Exception:  # wrong arguments of some logging call: not worth a request
            record.msg, record.args = f"a line of {record.name} that can't be written", None
        if len(record.msg) > _MAX_CHARACTERS:
            record.msg = record.message = f"{record.msg[:_MAX_CHARACTERS]}..."
        return record


class _Writer(QueueListener):
    """Writes records to standard error.

    A `StreamHandler` would be locked while it writes to a stalled pipe, and the end of the process
    would wait for that lock.
    """

    def __init__(self, lines: SimpleQueue[logging.LogRecord | None], formatter: logging.Formatter) -> None:
        super().__init__(lines)
        self._formatter = formatter
        self._told, self._told_at = lost_lines.total, -math.inf  # how many of them the log knows about, since when

    def handle(self, record: logging.LogRecord) -> None:
        """Write a line, or lose it; and say how many were lost before it."""
        try:
            self._tell(lost_lines.total, time.monotonic())
            self._write(record)
        except (OSError, ValueError):  # disk full, pipe closed, stream closed
            lost_lines.count()

    def _tell(self, lost: int, now: float) -> None:
        if lost > self._told and now > self._told_at + _TELL_EVERY_S:
            message = f"{lost - self._told} lines of this log were lost: they could not be written in time"
            self._write(logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None))
            self._told, self._told_at = lost, now

    def _write(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self._formatter.format(record) + "\n")
        sys.stderr.flush()


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        request = getattr(record, "record", None)
        if request is None:
            return f"{when} {record.levelname.lower()}: {super().format(record)}"
        counted = f" texts={request.texts} tokens={request.tokens}" if request.texts else ""
        took = f"{request.seconds * 1000:.1f} ms"
        path = json.dumps(request.path)[1:-1]  # no line breaks from outside
        return f"{when} {request.method} {path} {request.status} {took}{counted} bytes={request.bytes} id={request.id}"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
        }
        request = getattr(record, "record", None)
        if request is None:
            entry["message"] = super().format(record)
        else:
            entry |= {name: getattr(request, name) for name in ("method", "path", "status", "texts", "tokens", "bytes")}
            entry |= {"ms": round(request.seconds * 1000, 2), "request_id": request.id}
        return json.dumps(entry, ensure_ascii=False)
