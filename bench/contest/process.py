"""Start a worker process and talk to it. inside/worker.py is the other end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbert_infer.bench.errors import WorkerError

_SCRIPT = Path(__file__).resolve().parents[1] / "inside" / "worker.py"
# No library may use the network or send telemetry while another one is timed.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}
_CAN_STOP = hasattr(signal, "SIGSTOP")


class RemoteWorker:
    """A process that handles one request at a time and is stopped (SIGSTOP) in between.

    Libraries keep threads that spin or poll; without the stop they would take time from the
    contestant being measured.
    """

    def __init__(self, python: str = sys.executable, environment: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed by `close`
        kept = dict(os.environ)
        if Path(python) != Path(sys.executable):  # another interpreter has packages of its own
            for name in ("PYTHONPATH", "PYTHONHOME"):
                kept.pop(name, None)
        self._process = subprocess.Popen(  # noqa: S603 - our own script, in an interpreter the user chose
            [python, str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**kept, **_QUIET, **(environment or {})},
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for the reply."""
        self._signal("SIGCONT")
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101, PT018 - for mypy
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise self._death()
        self._signal("SIGSTOP")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def close(self) -> None:
        """Kill the process, whatever it is doing."""
        with contextlib.suppress(BrokenPipeError):
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _death(self) -> WorkerError:
        code = self._process.wait()
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 2000))
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        last = lines[-1].strip() if lines else ""
        if code < 0:
            with contextlib.suppress(ValueError):
                return WorkerError(f"killed by {signal.Signals(-code).name}" + (f" ({last})" if last else ""), -code)
        return WorkerError(f"exited with {code}" + (f": {last}" if last else ""))

    def _signal(self, name: str) -> None:
        if _CAN_STOP and self._process.poll() is None:
            self._process.send_signal(getattr(signal, name))
