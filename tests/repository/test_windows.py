"""Every module can be imported on Windows, which lacks some modules and functions of POSIX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.sources import PACKAGE, modules

INSIDE_TRITON = "sbert_infer.export.triton_server.tokenizer"  # runs in Triton Inference Server only
# Their libraries are in the environment of tests/libraries.txt, not in this one.
_LIBRARIES = "bertopic chonkie chroma haystack keybert lancedb langchain llama_index txtai"
ELSEWHERE = {INSIDE_TRITON, *(f"sbert_infer.integrations.{name}" for name in _LIBRARIES.split())}

# Imports the modules twice: first as they are, which also loads the libraries they need, then the
# modules alone again, without what Windows lacks.
SCRIPT = """
import importlib, os, signal, sys

names = sys.argv[1:]
for name in names:
    importlib.import_module(name)
for name in [name for name in sys.modules if name.split(".")[0] in {name.split(".")[0] for name in names}]:
    del sys.modules[name]
for name in ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "readline", "uvloop"):
    sys.modules[name] = None
for name in ("fork", "register_at_fork", "sched_getaffinity", "getloadavg", "getuid", "uname", "killpg", "setsid",
             "O_TMPFILE", "O_NONBLOCK", "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC"):
    vars(os).pop(name, None)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGPIPE", "SIGALRM"):
    vars(signal).pop(name, None)
sys.platform = "win32"
for name in names:
    importlib.import_module(name)
"""


def import_as_on_windows(*names: str, folder: Path | None = None) -> str:
    """The last line of the error; nothing if all modules were imported."""
    command = [sys.executable, "-c", SCRIPT, *names]
    environment = {**os.environ, **({} if folder is None else {"PYTHONPATH": str(folder)})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=200)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def test_every_module_imports() -> None:
    names = [module.name for module in modules(*PACKAGE) if module.name not in ELSEWHERE]
    assert {"sbert_infer._util.files", "sbert_infer.export.write", "sbert_infer.embed.cli"} <= set(names)
    assert import_as_on_windows(*names) == ""


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import fcntl", "ModuleNotFoundError: import of fcntl halted"),
        ("from resource import getrlimit", "ModuleNotFoundError: import of resource halted"),
        ("import signal\nEND = signal.SIGKILL", "AttributeError: module 'signal' has no attribute 'SIGKILL'"),
        ("import os\nos.register_at_fork(before=print)", "AttributeError: module 'os' has no attribute"),
        ("def lock():\n    import fcntl", ""),
    ],
)
def test_what_windows_lacks_is_noticed(source: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(source)
    assert import_as_on_windows("module", folder=tmp_path).startswith(error)
