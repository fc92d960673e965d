"""What all commands of sbert-bench share: exit codes, errors in one line, steps in a log."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sbert_infer.bench import console
from sbert_infer.bench.console import long_run, make_workloads, plain_errors, text_options


@click.command()
@text_options
def count(workloads: tuple[tuple[str, int | None], ...], texts_file: Path | None, num_texts: int) -> None:
    """Print how many texts there are of each kind."""
    click.echo({kind: len(texts) for kind, texts in make_workloads(workloads, texts_file, num_texts, 0).items()})


def test_a_workload_can_have_a_count_of_its_own() -> None:
    counted = CliRunner().invoke(count, ["--workload", "short:7", "--workload", "long", "--num-texts", "3"])
    assert counted.output == "{'short': 7, 'long': 3}\n"


@pytest.mark.parametrize(("given", "named"), [("sort", "'sort'"), ("short:0", "0"), ("short:", "''"), ("short:x", "x")])
def test_a_bad_workload_is_named(given: str, named: str) -> None:
    refused = CliRunner().invoke(count, ["--workload", given])
    assert refused.exit_code == 2
    assert "--workload" in refused.output
    assert named in refused.output


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
