"""What all commands of sbert-bench share: exit codes, errors in one line, steps in a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from sbert_infer.bench import console
from sbert_infer.bench.console import long_run, plain_errors


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with long_run() as (_, progress):
        progress("first")
        progress("too soon")
        monkeypatch.setattr(console, "_LINE_S", 0.0)
        progress("later")
    assert capsys.readouterr().err == "first\nlater\n"


def test_the_folders_of_outputs_are_made(tmp_path: Path) -> None:
    with long_run(tmp_path / "new" / "er" / "report.html", None):
        assert (tmp_path / "new" / "er").is_dir()


def test_a_missing_package_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped, plain_errors():
        raise ModuleNotFoundError("No module named 'httptools'", name="httptools")
    assert stopped.value.code == 1
    expected = "error: httptools is not installed, sbert-bench needs it: pip install 'sbert-infer[bench]'\n"
    assert capsys.readouterr().err == expected


def test_ctrl_c_is_130() -> None:
    with pytest.raises(SystemExit) as stopped, plain_errors():
        raise KeyboardInterrupt
    assert stopped.value.code == 130
