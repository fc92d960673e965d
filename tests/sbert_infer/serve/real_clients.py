"""Scripts with real clients, run in the environment that tests/clients.txt describes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("SBERT_INFER_CLIENTS_PYTHON", ROOT / ".venv-clients" / "bin" / "python"))
# The newest openai, which litellm does not allow beside itself, as it comes with every other
# client.
NEWEST_OPENAI = sorted(PYTHON.parents[1].glob("openai-*"))
KEY = "a key"

needs_clients = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"{PYTHON} is missing: run make test, or set SBERT_INFER_CLIENTS_PYTHON"
)


def run_client(name: str, url: str, *, newest: bool = True, **given: Any) -> Any:
    """The last line that a script in clients/ prints."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", ""),
        "PYTHONUTF8": "1",
        # No requests to anything but the server.
        "ANONYMIZED_TELEMETRY": "False",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "*",
    }
    if newest and NEWEST_OPENAI:
        environment["PYTHONPATH"] = str(NEWEST_OPENAI[-1])
    given = {"url": url, "key": KEY, "model": "minilm", **given}
    command = [str(PYTHON), str(Path(__file__).parent / "clients" / f"{name}.py")]
    done = subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
