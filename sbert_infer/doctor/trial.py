"""Opening an artifact as `Engine` does: what runs it, and why nothing better; then running it.

This runs in a process of its own, since native libraries may crash.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from sbert_infer import Engine, Reranker
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.manifest import ENCODER, RERANKER, SPARSE_ENCODER, Artifact
from sbert_infer.artifact.plan_file import Plan
from sbert_infer.backends.choice import NoChoiceError, recall
from sbert_infer.backends.select import OPENVINO, READY, BackendOptions, WouldBuildError, open_backend
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.doctor.packages import end_of_process
from sbert_infer.encode.self_check import WRONG, SelfCheck, Verdict
from sbert_infer.errors import SbertInferError, WrongVectorsError

_WORDS = "a red fox runs over nine green hills and sleeps under two old trees by the sea".split()  # noqa: SIM905
_LENGTHS = (1, 3, 9, 30, 100, 240)  # in words
_MIN_COSINE = 0.999  # of a vector made alone to the same one made in a batch; FP16 has some noise
_SPEED_S = 1.0
_MOST_TEXTS = 16384
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from sbert_infer.doctor.trial import main; main()"
_NEWS = "news: "  # begins a line of that process which is meant for the user

Rows = list[npt.NDArray[np.float32]]


def try_in_process(path: Path, device: str | None, run: bool) -> dict[str, Any]:
    """Call `try_artifact` in another process; if that crashes, say so.

    What takes minutes there is announced on stderr.
    """
    command = [sys.executable, "-c", _START, json.dumps(sys.path), str(path), device or "", "run" if run else ""]
    text: dict[str, Any] = {"encoding": "utf-8", "errors": "replace"}
    with TemporaryFile("w+", **text) as errors:  # a pipe that is read only at the end could fill up
        last = ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, **text) as process:  # noqa: S603
            for last in process.stdout or ():
                if last.startswith(_NEWS):
                    click.echo(last.removeprefix(_NEWS), err=True, nl=False)
        if process.returncode == 0:
            answer: dict[str, Any] = json.loads(last)
            return answer
        errors.seek(0)
        return {**_nothing(path), "error": end_of_process(process.returncode, errors.read())}


def main() -> None:
    """Print, as a line of JSON, what `try_artifact` returns for the arguments of this process."""
    path, device, run = sys.argv[2:]
    print("\n" + json.dumps(try_artifact(Path(path), device or None, run == "run")))


def try_artifact(path: Path, device: str | None = None, run: bool = False) -> dict[str, Any]:
    """Return what would run the artifact, and why nothing better; with `run`, also run it."""
    result = _nothing(path)
    passed_over: list[dict[str, str]] = []

    def pass_over(choice: str, why: str) -> None:
        passed_over.append({"choice": choice, "why": why})
        if choice == READY and run:
            print(f"\n{_NEWS}building a TensorRT engine for this GPU, which may take minutes", flush=True)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they say what `passed_over` says
            artifact = open_artifact(path)
            result |= _describe(artifact) | {"tuned": _tuned(artifact)}
            if run:
                opener = Reranker if artifact.manifest.kind == RERANKER else Engine
                with opener(artifact, device=device, on_truncate="ignore", passed_over=pass_over) as engine:
                    result |= {"uses": engine.info["backend"], "verified": engine.info["verified"]}
                    result["run"] = _run(engine)
            else:
                check = SelfCheck(artifact, "once")
                options = BackendOptions(device, build=False, passed_over=pass_over, accept=check)
                result |= {"uses": _choose(artifact, options), "verified": asdict(check.verdict)}
            if cuda.driver_problem() and not isinstance(artifact, Plan):
                # An ONNX file has no better choice than the CPU where there is no GPU.
                passed_over[:] = [each for each in passed_over if each["choice"] == OPENVINO]
    except (SbertInferError, ValueError, OSError) as error:
        result["error"] = " ".join(str(error).split())
        if isinstance(error, WrongVectorsError):
            result["verified"] = asdict(Verdict(WRONG))
    return {**result, "passed_over": passed_over}


def _nothing(path: Path) -> dict[str, Any]:
    keys = ("kind", "model", "precision", "engines", "uses", "passed_over", "verified", "tuned", "run", "error")
    return {"file": path.name, **dict.fromkeys(keys)}


def _describe(artifact: Artifact) -> dict[str, Any]:
    manifest = artifact.manifest
    engines = [engine.describe() for engine in artifact.engines] if isinstance(artifact, Plan) else []
    return {"kind": manifest.kind, "model": manifest.name, "precision": manifest.precision, "engines": engines}


def _tuned(artifact: Artifact) -> str:
    """Return what `compute="auto"` would open, or why not."""
    try:
        return str(recall(artifact)[0])
    except NoChoiceError as error:
        return f"the default: {error}"


def _choose(artifact: Artifact, options: BackendOptions) -> str:
    try:
        backend = open_backend(artifact, options)
    except WouldBuildError:
        return "TensorRT, with an engine that is built at first use (minutes) and cached"
    try:
        return backend.describe()
    finally:
        backend.close()


def _run(engine: Engine | Reranker) -> dict[str, Any]:
    texts = [_text(length, length) for length in _LENGTHS]
    together = _encode(engine, texts)
    alone = [row for text in texts for row in _encode(engine, [text])]
    unit = engine.manifest.kind == ENCODER and engine.manifest.normalized
    return {"checks": _checks(together, alone, unit), **_speed(engine)}


def _text(words: int, number: int) -> str:
    """Return a text of so many words, and another one for each number."""
    return " ".join(_WORDS[(number + at * (number % 7 + 1)) % len(_WORDS)] for at in range(words - 1)) + f" {number}"


def _encode(engine: Engine | Reranker, texts: list[str]) -> Rows:
    """Return what the model gives for each text, whatever its kind, as a flat array."""
    found: Any
    if isinstance(engine, Reranker):
        found = engine.predict([("what does the fox do?", text) for text in texts])
    else:
        found = engine.encode(texts)
        found = found.toarray() if engine.manifest.kind == SPARSE_ENCODER else found
    return [np.atleast_1d(np.asarray(row, np.float32)).ravel() for row in found]


def _checks(together: Rows, alone: Rows, unit: bool) -> list[dict[str, Any]]:
    rows = [*together, *alone]
    checks = [_check("all numbers are finite", all(np.isfinite(row).all() for row in rows))]
    if unit:
        checks.append(_check("vectors have length 1", all(abs(np.linalg.norm(row) - 1) < 1e-3 for row in rows)))
    different = len({row.tobytes() for row in together}) == len(together)
    checks.append(_check("different texts have different results", different))
    same = all(_same(one, other) for one, other in zip(together, alone, strict=True))
    checks.append(_check("a text has the same result alone and in a batch", same))
    return checks


def _check(name: str, passed: bool) -> dict[str, Any]:
    return {"name": name, "passed": bool(passed)}


def _same(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> bool:
    if one.shape != other.shape:
        return False
    if one.size == 1:
        return bool(np.allclose(one, other, atol=1e-2))
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return bool(one @ other >= _MIN_COSINE * lengths)


def _speed(engine: Engine | Reranker) -> dict[str, Any]:
    """Encode more and more short texts until that takes a second; return the last figure."""
    count, start = 32, 0
    while True:
        texts = [_text(8 + number % 16, number + 1) for number in range(start, start + count)]
        began = time.perf_counter()
        _encode(engine, texts)
        took = time.perf_counter() - began
        if took >= _SPEED_S or count >= _MOST_TEXTS:
            tokens = engine.last_stats.tokens / count
            return {"texts": count, "mean_tokens": round(tokens, 1), "texts_per_s": round(count / took, 1)}
        start, count = start + count, count * 4
