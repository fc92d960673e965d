"""Log lines, as text or JSON, written by a thread: a full disk or a pipe that nobody reads never holds up a request."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, TextIO

__all__ = ["LogWriter", "logging_to_stderr"]

_MAX_LINES = 10_000  # that wait to be written; more are lost
_EVERY_S = 0.1
# What our lines never show. The standard library's own advice for those in a hurry is to turn them
# off.
_DETAILS = ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing")


class LogWriter(logging.Handler):
    """Keeps lines for a thread that writes them, some at a time. `lost` counts those that could not be."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self.lost = 0
        self._stream = stream or sys.stderr
        self._lines: deque[str | logging.LogRecord] = deque()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write, name="sbert-serve-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line. Nothing is woken up: that would cost a busy server more than the line."""
        if len(self._lines) >= _MAX_LINES:
            self.lost += 1
        elif hasattr(record, "record"):  # of a request, and nothing in it will change: the thread can write it out
            self._lines.append(record)
        else:
            self._lines.append(self._line(record))

    def _line(self, record: logging.LogRecord) -> str:
        try:
            return self.format(record)
        except Exception:  # somebody's wrong arguments: not worth a request
            return f"{record.levelname.lower()}: a line of {record.name} that can't be written"

    def close(self) -> None:
        """Write what waits, unless that takes long."""
        super().close()
        self._ended.set()
        self._thread.join(timeout=2)

    def _write(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(_EVERY_S)
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            if lines:
                self._write_lines([line if isinstance(line, str) else self._line(line) for line in lines])

    def _write_lines(self, lines: list[str]) -> None:
        try:
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # disk full, pipe closed, stream closed
            self.lost += len(lines)


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


@contextmanager
def logging_to_stderr(as_json: bool) -> Iterator[None]:
    """Within this context, all log records and warnings of this process go to standard error."""
    writer = LogWriter()
    writer.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    before = root.handlers[:], root.level, uvicorn.level
    details = {name: getattr(logging, name) for name in _DETAILS}
    for name in _DETAILS:
        setattr(logging, name, None)
    root.handlers[:] = [writer]
    root.setLevel(logging.INFO)
    uvicorn.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for name, value in details.items():
            setattr(logging, name, value)
        root.handlers[:], root.level, uvicorn.level = before
        writer.close()
