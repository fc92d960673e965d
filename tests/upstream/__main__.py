"""Run the tests of sentence-transformers with our artifacts in the place of its models.

`make test-upstream UPSTREAM=path/to/sentence-transformers`, with a checkout of the installed
version. The tests run twice: with its own models on small random checkpoints, which shows what
needs the hub or real weights, and with engines on the artifacts of the same checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from sbert_infer.export.exporter import ExportOptions, export
from tests.models.checkpoints import write_checkpoint
from tests.models.cross_encoders import write_cross_encoder
from tests.models.multi_vectors import write_multi_vector
from tests.models.sparse_encoders import write_splade

# Tests of what an engine does; not of training, saving, model cards, modules and other backends.
FILES = (
    "sentence_transformer/test_model.py",
    "sentence_transformer/test_multi_process.py",
    "sentence_transformer/test_compute_embeddings.py",
    "sentence_transformer/evaluation",
    "util/test_hard_negatives.py",
    "util/test_retrieval.py",
    "cross_encoder/test_model.py",
    "cross_encoder/test_multi_process.py",
    "cross_encoder/evaluation",
    "sparse_encoder/test_model.py",
    "sparse_encoder/test_multi_process.py",
    "sparse_encoder/test_search_engines.py",
    "multi_vector_encoder/test_model.py",
    "multi_vector_encoder/test_multi_process.py",
    "multi_vector_encoder/test_evaluators.py",
)
COLUMNS = ("passed", "failed", "wording", "does not apply")
# Errors by which an engine refuses what it can't do, or with which a test reaches into a model.
_REFUSED = re.compile(
    r"no torch modules or weights|can't be trained|would have no effect|can't be set|has no option|copy that"
    r"|chosen when it is exported|compiled already|use encode|can't be moved|has no attribute '_"
)
_WORDING = re.compile(r"(Regex p|P)attern did not match|assert .* in .*(caplog|text)", re.DOTALL)


def main() -> None:
    """Print what passes, by file, and the names of the tests that fail."""
    parser = argparse.ArgumentParser(prog="make test-upstream", description=__doc__)
    parser.add_argument("upstream", type=Path, help="a checkout of sentence-transformers")
    parser.add_argument("files", nargs="*", default=FILES, help="files or folders below its tests/")
    options = parser.parse_args()
    if not (options.upstream / "tests" / "conftest.py").is_file():
        parser.error(f"{options.upstream} is no checkout of sentence-transformers: it has no tests/conftest.py")
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        own, ours = (run(options.upstream, options.files, Path(folder), models) for models in ("own", "engines"))
    print(table(own, ours))


def write_models(folder: Path) -> None:
    """Write a small random checkpoint of each kind, and its artifact."""
    wide = {"out_features": 128, "bias": True, "activation_function": "Identity"}  # as of stsb-bert-tiny
    write_checkpoint(folder / "SentenceTransformer", normalize=False, dense=[wide])
    write_cross_encoder(folder / "CrossEncoder")
    write_splade(folder / "SparseEncoder")
    write_multi_vector(folder / "MultiVectorEncoder")
    for checkpoint in sorted(folder.iterdir()):
        export(checkpoint, folder / f"{checkpoint.name}.onnx", ExportOptions())


def run(upstream: Path, files: list[str], folder: Path, models: str) -> dict[str, Any]:
    """Run the tests with these `models`: "own" or "engines". Return the outcome of each test."""
    outcomes = folder / f"{models}.json"
    here = {"SBERT_UPSTREAM_FOLDER": str(folder), "SBERT_UPSTREAM_MODELS": models}
    here |= {"SBERT_UPSTREAM_OUTCOMES": str(outcomes), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, "-m", "pytest", "-p", "stand_ins", "-p", "no:cacheprovider", "-q", "--tb=no"]
    command += [f"tests/{file}" for file in files]
    subprocess.run(command, cwd=upstream, env={**os.environ, **here, "PYTHONPATH": path}, check=False)
    found: dict[str, Any] = json.loads(outcomes.read_text(encoding="utf-8"))
    return found


def verdict(own: dict[str, Any], ours: dict[str, Any]) -> str:
    """Compare the outcomes of one test with its own model and with an engine."""
    if ours["outcome"] == "passed":
        return "passed"
    if own["outcome"] != "passed" or ours["outcome"] == "skipped" or _REFUSED.search(ours["error"]):
        return "does not apply"
    return "wording" if _WORDING.search(ours["error"]) else "failed"


def table(own: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return the counts by file, of tests that use an engine, and the failures."""
    counts: dict[str, Counter[str]] = {}
    failures = []
    for name, outcome in ours.items():
        if outcome["touched"]:
            found = verdict(own[name], outcome)
            counts.setdefault(name.partition("::")[0].removeprefix("tests/"), Counter())[found] += 1
            if found in ("failed", "wording"):
                failures.append(f"{found}: {name.removeprefix('tests/')}\n    {outcome['error'].splitlines()[0]:.160}")
    counts["all"] = sum(counts.values(), Counter())
    width = max(map(len, counts))
    lines = ["".join([" " * width, *(f"{column:>16}" for column in COLUMNS)])]
    lines += [
        "".join([f"{file:{width}}", *(f"{each[column]:16}" for column in COLUMNS)]) for file, each in counts.items()
    ]
    return "\n".join([*lines, "", *failures])


if __name__ == "__main__":
    main()
