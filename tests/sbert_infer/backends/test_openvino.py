"""OpenVINO: missing, too old, broken or crashing, each with a clear line; forks and closing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sbert_infer import Engine, EngineError
from sbert_infer.backends import openvino_install
from sbert_infer.backends.openvino_install import ISA_VARIABLE, WITHOUT_AMX, why_no_bf16
from sbert_infer.export.exporter import ExportOptions, export

CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
NEEDS_BF16 = pytest.mark.skipif(why_no_bf16() is not None, reason=f"{why_no_bf16()}")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No verdict is kept, neither in the cache nor in this process."""
    monkeypatch.setenv("SBERT_INFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    openvino_install._kept_trial.cache_clear()
    yield
    openvino_install._kept_trial.cache_clear()


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path], once: Callable[..., Path]) -> Path:
    options = ExportOptions(bf16=True, max_length=24, min_cosine=0.9)
    return once("tiny bf16", "tiny.bf16.onnx", lambda target: export(make_checkpoint(), target, options))


@pytest.mark.parametrize(
    ("version", "line"),
    [(None, "OpenVINO is not installed: pip install"), ("2023.3.0", "2023.3.0 is older than 2025.0")],
)
def test_none_or_an_old_one(tiny: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, line: str) -> None:
    monkeypatch.setattr(openvino_install, "openvino_version", lambda: version)
    with pytest.warns(UserWarning, match=line):
        Engine(tiny).close()
    with pytest.raises(EngineError, match=f"can't run in BF16: .*{line}"):
        Engine(tiny, strict=True)


@pytest.mark.parametrize(
    ("trial", "line"),
    [(CRASH, "crashes on this CPU .SIGILL."), ("import no_such_module", "is broken .ModuleNotFoundError")],
)
def test_one_that_crashes_or_is_broken(tiny: Path, monkeypatch: pytest.MonkeyPatch, trial: str, line: str) -> None:
    monkeypatch.setattr(openvino_install, "_TRIAL", trial)
    with pytest.warns(UserWarning, match=line):
        engine = Engine(tiny)
    with engine:
        assert engine.encode("still here").shape == (engine.manifest.dim,)


def test_one_killed_from_outside_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short, for example: that says nothing about the CPU, and is not kept."""
    monkeypatch.setattr(openvino_install, "_TRIAL", CRASH.replace("SIGILL", "SIGKILL"))
    assert "was killed (SIGKILL)" in str(why_no_bf16())
    monkeypatch.setattr(openvino_install, "_TRIAL", "print('true')")
    openvino_install._kept_trial.cache_clear()
    assert why_no_bf16() is None


def test_amx_that_is_refused_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = f"import os\nif os.environ.get({ISA_VARIABLE!r}) != {WITHOUT_AMX!r}: {CRASH}\nprint('true')"
    monkeypatch.setattr(openvino_install, "_TRIAL", refuses.replace(": import", ":\n import"))
    assert openvino_install._verdict() == WITHOUT_AMX
    monkeypatch.setattr(openvino_install, "_TRIAL", "raise SystemExit('is not tried again')")
    openvino_install._kept_trial.cache_clear()
    assert openvino_install._verdict() == WITHOUT_AMX


@NEEDS_BF16
def test_after_a_fork_it_says_so(tiny: Path) -> None:
    code = f"""
import os
from sbert_infer import Engine, EngineError
engine = Engine({str(tiny)!r})
engine.encode("before")
if (child := os.fork()) == 0:
    try:
        engine.encode("after")
    except EngineError as error:
        os._exit(7 if "after a fork" in str(error) else 1)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    if hasattr(os, "fork"):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@NEEDS_BF16
def test_a_closed_one_says_so(tiny: Path) -> None:
    engine = Engine(tiny, workers=2, threads=1)
    assert engine.info["backend"].endswith("on CPU, bf16, 2 workers x 1 threads")
    backend = engine.pipeline.backend
    engine.close()
    backend.close()
    with pytest.raises(EngineError, match="is closed"):
        engine.encode("too late")
