"""Run the tests of sentence-transformers with our artifacts in the place of its models.

`make test-upstream UPSTREAM=path/to/sentence-transformers`. The checkout's own package runs, not
the installed one. All tests run with engines; those that do not pass run once more with models of
sentence-transformers on the same checkpoints, which shows what needs the hub or trained weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.upstream.models import write_models

# Tests of what an engine does; not of training, losses, model cards, modules and other backends.
FILES = (
    "base/test_model.py",
    "sentence_transformer/test_model.py",
    "sentence_transformer/test_multi_process.py",
    "sentence_transformer/test_compute_embeddings.py",
    "sentence_transformer/evaluation",
    "util",
    "cross_encoder/test_model.py",
    "cross_encoder/test_multi_process.py",
    "cross_encoder/evaluation",
    "sparse_encoder/test_model.py",
    "sparse_encoder/test_multi_process.py",
    "sparse_encoder/test_search_engines.py",
    "multi_vector_encoder/test_model.py",
    "multi_vector_encoder/test_multi_process.py",
    "multi_vector_encoder/test_evaluators.py",
    "multi_vector_encoder/test_interpretability.py",
    "multi_vector_encoder/test_token_pooling.py",
)
COLUMNS = ("passed", "failed", "wording", "does not apply", "needs the hub")
LIMIT_S = 120  # for one test
RUN_LIMIT_S = 3600  # for all of them
# Errors by which an engine refuses what it can't do, or with which a test reaches into a model.
_REFUSED = re.compile(
    r"no torch modules or weights|can't be trained|would have no effect|can't be set: it is chosen|has no option"
    r"|is a file already: copy that|chosen when it is exported|compiled already|use predict, which also|can't be moved"
    r"|has no gradients|features that preprocess returns"
    r"|has no attribute '(_|add_module|register_forward_hook|model')|has no len\(\)|must be a str, got (ndarray|dict)"
    r"|revision is for a checkpoint"
)
# Tests of inputs that are no texts, or of models that pretend to take such.
_NO_TEXTS = re.compile(
    r"test_preprocess_modality_error|test_supports_parametrized|is_singular_input_(conversation|tensor|numpy$|numpy_bytes)"
)
# A message in other words, or one of `warnings` where the test looks for a line of the log.
_WORDING = re.compile(r"(Regex p|P)attern did not match|LogCaptureFixture")


def main() -> None:
    """Print what passes, by file, and the names of the tests that fail."""
    parser = argparse.ArgumentParser(prog="make test-upstream", description=__doc__)
    parser.add_argument("upstream", type=Path, help="a checkout of sentence-transformers")
    parser.add_argument("files", nargs="*", default=FILES, help="files or folders below its tests/")
    parser.add_argument("--models", type=Path, help="keep the models in this folder, for the next run")
    options = parser.parse_args()
    upstream = options.upstream.resolve()
    if not (upstream / "tests" / "conftest.py").is_file():
        parser.error(f"{upstream} is no checkout of sentence-transformers: it has no tests/conftest.py")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.models or Path(temporary)
        if not any(folder.glob("*.onnx")):
            write_models(folder)
        ours = run(upstream, options.files, folder, engines=True)
        rest = [name for name, found in ours.items() if found["touched"] and found["outcome"] == "failed"]
        own = run(upstream, options.files, folder, engines=False, only=rest)
    verdicts = {name: verdict(own.get(name), found) for name, found in ours.items() if found["touched"]}
    print(table(verdicts))
    for wanted in COLUMNS[1:]:
        print(f"\n{wanted}:")
        for name in (name for name, found in verdicts.items() if found == wanted):
            error = ours[name]["error"] or "skipped"
            print(f"  {name.removeprefix('tests/')}\n      {error.splitlines()[0]:.200}")


def run(
    upstream: Path, files: list[str], folder: Path, *, engines: bool, only: list[str] | None = None
) -> dict[str, Any]:
    """Run the tests, with engines or with the checkout's own models. Return each test's outcome."""
    outcomes = folder.resolve() / ("engines.jsonl" if engines else "own.jsonl")
    outcomes.write_text("", encoding="utf-8")
    settings = {"folder": str(folder.resolve()), "outcomes": str(outcomes), "limit_s": LIMIT_S}
    settings |= {"engines": engines, "only": only}
    file = folder.resolve() / "settings.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    path = os.pathsep.join([str(Path(__file__).parent), str(upstream), *filter(None, sys.path)])
    here = {"SBERT_UPSTREAM_SETTINGS": str(file), "PYTHONPATH": path}
    here |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-p", "stand_ins", "-p", "no:cacheprovider", "-q", "--tb=no", "-rN"]
    command += ["--continue-on-collection-errors"]
    command += ["-m", "not custom"]  # also its slow tests, which are those of processes
    command += [f"tests/{file}" for file in files]
    # A group of its own: what tests leave running ends with it.
    with subprocess.Popen(command, cwd=upstream, env={**os.environ, **here}, start_new_session=True) as process:
        try:
            process.wait(RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"stopped after {RUN_LIMIT_S} s; the tests that did not run are missing below")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return {found["test"]: found for found in map(json.loads, outcomes.read_text(encoding="utf-8").splitlines())}


def verdict(own: dict[str, Any] | None, ours: dict[str, Any]) -> str:
    """Compare the outcomes of one test with an engine and with the checkout's own model."""
    if ours["outcome"] == "passed":
        return "passed"
    if ours["outcome"] == "skipped" or _REFUSED.search(ours["error"]) or _NO_TEXTS.search(ours["test"]):
        return "does not apply"
    if own is not None and own["outcome"] != "passed":
        return "needs the hub"
    return "wording" if _WORDING.search(ours["error"]) else "failed"


def table(verdicts: dict[str, str]) -> str:
    """Return the counts by file, of tests that use an engine."""
    counts: dict[str, Counter[str]] = {}
    for name, found in verdicts.items():
        counts.setdefault(name.partition("::")[0].removeprefix("tests/"), Counter())[found] += 1
    counts["all"] = sum(counts.values(), Counter())
    width = max(map(len, counts))
    lines = ["".join([" " * width, *(f"{column:>16}" for column in COLUMNS)])]
    for file, each in counts.items():
        lines.append("".join([f"{file:{width}}", *(f"{each[column]:16}" for column in COLUMNS)]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
