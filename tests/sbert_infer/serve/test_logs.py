"""Log lines: their two forms, and a standard error that does not take them."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from sbert_infer.serve.http.request_log import Record
from sbert_infer.serve.logs import logging_to_stderr, lost_lines
from sbert_infer.serve.metrics import Metrics
from tests.sbert_infer.serve.conftest import Running, until

logger = logging.getLogger("sbert_infer.serve.test")
WHEN = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def log_all_kinds() -> None:
    logger.info("%d texts", 3)
    try:
        raise KeyError("x")
    except KeyError:
        logger.exception("failed")
    logger.warning("%d texts", "three")
    warnings.warn("beware", stacklevel=1)
    record = Record("id-1", "POST", "/embed\n", 0.0, status=200, seconds=0.0123, texts=2, tokens=7, bytes=99)
    logger.info("request", extra={"record": record})


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to_stderr(as_json=False):
        log_all_kinds()
    first, failed, *trace, wrong, beware, _, _, request = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"{WHEN} info: 3 texts", first)
    assert re.fullmatch(f"{WHEN} error: failed", failed)
    assert trace[0].startswith("Traceback")
    assert trace[-1] == "KeyError: 'x'"
    assert re.fullmatch(f"{WHEN} warning: a line of sbert_infer.serve.test that can't be written", wrong)
    assert "UserWarning: beware" in beware
    assert re.fullmatch(rf"{WHEN} POST /embed\\n 200 12.3 ms texts=2 tokens=7 bytes=99 id=id-1", request)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to_stderr(as_json=True):
        log_all_kinds()
    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [entry["level"] for entry in entries] == ["info", "error", "warning", "warning", "info"]
    assert entries[0]["message"] == "3 texts"
    assert "KeyError: 'x'" in entries[1]["message"]
    del entries[-1]["time"]
    assert entries[-1] == {
        "level": "info",
        "method": "POST",
        "path": "/embed\n",
        "status": 200,
        "texts": 2,
        "tokens": 7,
        "bytes": 99,
        "ms": 12.3,
        "request_id": "id-1",
    }


def test_everything_is_as_before_after_it() -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level, logging.getLogger("uvicorn").level
    with logging_to_stderr(as_json=False):
        assert len(root.handlers) == 1
    assert (root.handlers, root.level, logging.getLogger("uvicorn").level) == before


def test_a_stalled_pipe_holds_up_neither_callers_nor_the_end(tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = f"""
import logging, os
from pathlib import Path
from sbert_infer.serve.logs import logging_to_stderr

with logging_to_stderr(as_json=False):
    for number in range(20_000):
        logging.getLogger("test").warning("a line that is never read: %d %s", number, "x" * 100)
Path({str(done)!r}).touch()
"""
    reading, writing = os.pipe()
    try:
        start = time.monotonic()
        process = subprocess.Popen([sys.executable, "-c", code], stderr=writing)
        assert process.wait(60) == 0
        assert done.exists()
        assert time.monotonic() - start < 40
    finally:
        os.close(reading)
        os.close(writing)


def test_lines_that_nobody_reads_take_little_memory_and_are_counted(tmp_path: Path) -> None:
    found = tmp_path / "found"
    code = f"""
import logging, resource
from pathlib import Path
from sbert_infer.serve.http.request_log import new_record
from sbert_infer.serve.logs import logging_to_stderr, lost_lines

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak_mb()
logger = logging.getLogger("test")
with logging_to_stderr(as_json=True):
    for number in range(6_000):
        logger.warning("%d %s", number, "x" * 50_000)
        logger.info("request", extra={{"record": new_record((), "GET", "/" + "y" * 50_000)}})
    lost = lost_lines.total
Path({str(found)!r}).write_text(f"{{lost}} {{peak_mb() - before}}")
"""
    reading, writing = os.pipe()
    try:
        assert subprocess.Popen([sys.executable, "-c", code], stderr=writing).wait(60) == 0
    finally:
        os.close(reading)
        os.close(writing)
    lost, megabytes = map(float, found.read_text().split())
    assert 1_900 < lost <= 2_000  # a pipe holds some lines, the queue 10,000
    assert megabytes < 100  # of 600


class FullDisk:
    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, "full")


def test_the_log_says_what_it_lost(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with logging_to_stderr(as_json=False):
        before = lost_lines.total
        with monkeypatch.context() as broken:
            broken.setattr("sbert_infer.serve.logs.sys", SimpleNamespace(stderr=FullDisk()))
            for _ in range(3):
                logger.info("a line")
            until(lambda: lost_lines.total == before + 3)
        logger.info("another")
    lost, another = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"{WHEN} warning: 3 lines of this log were lost: they could not be written in time", lost)
    assert another.endswith("info: another")
    assert f"sbert_log_lines_lost_total {float(lost_lines.total)}\n" in Metrics().render().decode()


def test_a_long_path_is_cut(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert server.client.get("/" + "y" * 30_000).status_code == 404
        until(lambda: any(hasattr(record, "record") for record in caplog.records))
    (path,) = [record.record.path for record in caplog.records if hasattr(record, "record")]
    assert path == "/" + "y" * 255 + "..."
