"""The report of `sbert-doctor`, as plain values: what `--json` prints, and what is rendered."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sbert_infer import __version__
from sbert_infer.backends.select import OPENVINO, READY, WRONG_CURE
from sbert_infer.doctor.machine import Machine
from sbert_infer.doctor.packages import Packages
from sbert_infer.doctor.problems import Problem, find_problems
from sbert_infer.encode.self_check import WRONG

SCHEMA = 1  # raise it when a key is renamed or removed


def make_report(machine: Machine, packages: Packages, artifact: dict[str, Any] | None) -> dict[str, Any]:
    """Put together what was found. It names neither the user's folders nor the machine."""
    found = [*find_problems(machine, packages), *_of_artifact(machine, artifact)]
    report = {
        "schema": SCHEMA,
        "sbert_infer": __version__,
        "machine": asdict(machine),
        "packages": {name: asdict(package) for name, package in packages.found.items()},
        "onnxruntimes": list(packages.onnxruntimes),
        "problems": [_entry(problem) for problem in found if not problem.note],
        "notes": [_entry(problem) for problem in found if problem.note],
        "artifact": artifact,
    }
    return dict(_without_private(report))


def _entry(problem: Problem) -> dict[str, str]:
    return {name: value for name, value in asdict(problem).items() if name != "note"}


def _of_artifact(machine: Machine, artifact: dict[str, Any] | None) -> Iterator[Problem]:
    """Yield what is wrong with an artifact: it does not open, gives wrong vectors, or is slow."""
    if artifact is None:
        return
    name = artifact["file"]
    for check in (artifact["run"] or {}).get("checks", []):
        if not check["passed"]:
            what = f"{name}: it is not true that {check['name']}"
            cure = "export it again; if that does not help, report it with the output of sbert-doctor --json"
            yield Problem("wrong-vectors", what, "its results can't be trusted", cure)
    passed = artifact["passed_over"] or []
    if artifact["error"]:
        yield _not_opened(artifact)
        return
    for each in passed:
        if each["choice"] == OPENVINO:
            yield _no_bf16(name, each["why"])
    if machine.driver_problem is None and passed and name.endswith(".plan"):
        yield _passed_over(artifact)


def _not_opened(artifact: dict[str, Any]) -> Problem:
    """Return why an artifact can't be opened: wrong vectors, or what the error says."""
    kind, what, cure = "artifact", artifact["error"], "as the message says"
    before, _, command = what.rpartition(": ")
    if (artifact["verified"] or {}).get("verdict") == WRONG:
        kind, what, cure = "wrong-vectors", what.removesuffix(f"; {WRONG_CURE}"), WRONG_CURE
    elif command.startswith("pip "):
        what, cure = before, command
    is_named = artifact["file"] in what.partition(": ")[0]  # most messages begin with the path
    return Problem(kind, what if is_named else f"{artifact['file']}: {what}", "it can't be used", cure)


def _no_bf16(name: str, why: str) -> Problem:
    cure = "export it without --bf16, or accept FP32"
    before, _, command = why.rpartition(": ")
    if command.startswith("pip "):
        why, cure = before, command
    return Problem("no-bf16", f"{name} runs in FP32: {why}", "it runs slower than it could", cure)


def _passed_over(artifact: dict[str, Any]) -> Problem:
    """Return why a plan does not run better. An engine that is built here is as good as another."""
    name, passed = artifact["file"], artifact["passed_over"]
    if slower := [each for each in passed if each["choice"] != READY]:
        what = f"{name} does not run with {slower[0]['choice']}: {slower[0]['why']}"
        cure = "as the reason says, or export it on this machine: sbert-export MODEL --fp16"
        return Problem("not-the-best", what, "it runs slower than it could", cure)
    what = f"{name} brings no TensorRT engine that is ready for this GPU: {passed[0]['why']}"
    if artifact["run"]:
        follows, cure = "one was built and cached", "nothing is left to do on this machine"
    else:
        follows, cure = "one is built at first use, which may take minutes", f"build it now: sbert-doctor --run {name}"
    return Problem("not-ready", what, follows, cure, note=True)


def _without_private(value: Any) -> Any:
    """Replace the folders of the environment and the user, and the machine's name, in all texts."""
    if isinstance(value, dict):
        return {key: _without_private(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_private(each) for each in value]
    return _shortened(value) if isinstance(value, str) else value


def _shortened(text: str) -> str:
    home, host = str(Path.home()), socket.gethostname()
    for private, public in ((sys.prefix, "<environment>"), (sys.base_prefix, "<python>"), (home, "~")):
        text = text.replace(private, public) if len(private) > 1 else text
    return text.replace(host, "<host>") if len(host) > 3 else text
