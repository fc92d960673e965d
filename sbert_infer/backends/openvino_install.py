"""Whether the installed OpenVINO runs BF16 on this CPU: tried in a process of its own.

A CPU that announces AMX and refuses it, as on some shared hosts, ends the process with an illegal
instruction. Then it is tried again without AMX. The verdict is kept in the user's cache, by the
version of OpenVINO and the CPU.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sbert_infer._util.hardware import cpu_name, instruction_sets
from sbert_infer.backends.tensorrt.build_cache import engine_key, keep_verdict, kept_verdict
from sbert_infer.errors import EngineError

OLDEST = (2025, 0)
INSTALL = "pip install 'sbert-infer[openvino]'"
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"  # read once, when OpenVINO loads its part for CPUs
WITHOUT_AMX = "AVX512_CORE_BF16"
_TIMEOUT_S = 120.0

# Imports nothing of ours. Multiplies as a model does, with the instructions that OpenVINO chooses.
_TRIAL = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import numpy, openvino
from openvino import opset13 as ops
core = openvino.Core()
found = list(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
if "BF16" in found:
    tokens = ops.parameter([-1, 64], numpy.float32)
    layer = ops.relu(ops.matmul(tokens, ops.constant(numpy.ones((64, 64), numpy.float32)), False, False))
    product = ops.matmul(ops.softmax(layer, 1), layer, True, False)
    model = openvino.Model([product], [tokens])
    run = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
    for rows in (1, 16, 37):
        assert numpy.isfinite(run([numpy.ones((rows, 64), numpy.float32)])[0]).all()
print("\\n" + json.dumps("BF16" in found))
"""


def openvino_version() -> str | None:
    """Return the version of OpenVINO that is installed, such as 2026.4.1."""
    try:
        return version("openvino")
    except PackageNotFoundError:
        return None


def why_no_bf16() -> str | None:
    """Return why BF16 can't run here, and what to do if there is something; None if it can."""
    try:
        _verdict()
    except EngineError as error:
        return str(error)
    return None


def import_openvino() -> Any:
    """Import OpenVINO for BF16, without AMX where that crashes; raise `EngineError` if it can't."""
    limit = _verdict()
    if limit and os.environ.get(ISA_VARIABLE) != limit:
        if "openvino" in sys.modules:  # it may have read the variable by now
            set_it = f"set {ISA_VARIABLE}={limit} before the program starts"
            raise EngineError(f"this CPU announces AMX and refuses it, and OpenVINO is already loaded: {set_it}")
        os.environ[ISA_VARIABLE] = limit
    try:
        return import_module("openvino")
    except ImportError as error:
        raise EngineError(_broken(str(error))) from error


def _verdict() -> str:
    """Return the limit on instructions to run with, "" for none; raise if BF16 can't run."""
    found = openvino_version()
    if found is None:
        raise EngineError(f"OpenVINO is not installed: {INSTALL}")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise EngineError(f"OpenVINO {found} is older than {oldest}: pip install -U 'openvino>={oldest}'")
    kind, text = _kept_trial(found, os.environ.get(ISA_VARIABLE, ""))
    if kind == "runs":
        return text
    raise EngineError(text)


@functools.cache
def _kept_trial(found: str, limit: str) -> tuple[str, str]:
    """Return what `_try` finds, from the cache if it is there."""
    key = engine_key("bf16", found, cpu_name(), *instruction_sets(), limit)
    if (kept := kept_verdict(key)) is not None:
        kind, text = json.loads(kept)
        return kind, text
    kind, text = _try(found, limit)
    if kind in ("runs", "never"):
        keep_verdict(key, json.dumps([kind, text]).encode())
    return kind, text


def _try(found: str, limit: str) -> tuple[str, str]:
    """Return "runs" and a limit on instructions, or "never" or "fails" (today) and the reason."""
    for isa in dict.fromkeys([limit, WITHOUT_AMX]):
        try:
            done = _run_trial({ISA_VARIABLE: isa} if isa else {})
        except subprocess.TimeoutExpired:
            return "fails", f"OpenVINO {found} took longer than {_TIMEOUT_S:.0f} s to multiply two matrices"
        if done.returncode == 0:
            if json.loads(done.stdout.splitlines()[-1]):
                return "runs", isa
            return "never", "this CPU has no BF16 that OpenVINO uses"
        if done.returncode > 0:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            return "fails", _broken(lines[-1] if lines else f"code {done.returncode}")
    name = signal.Signals(-done.returncode).name
    if name in ("SIGKILL", "SIGTERM"):  # from outside: too little memory, or the end of a job
        return "fails", f"OpenVINO {found} was killed ({name}) while it multiplied two matrices"
    return "never", f"OpenVINO {found} crashes on this CPU ({name})"


def _run_trial(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the trial in a process of its own, with these environment variables."""
    return subprocess.run(  # noqa: S603
        [sys.executable, "-c", _TRIAL, json.dumps(sys.path)],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, **variables},
        timeout=_TIMEOUT_S,
        check=False,
    )


def _broken(what: str) -> str:
    return f"the installed OpenVINO is broken ({what}): pip install --force-reinstall --no-deps openvino"
