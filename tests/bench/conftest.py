"""Made-up results to render and compare, and one real, small run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbert_infer.artifact import open_artifact
from sbert_infer.bench.contest.lineup import EAGER, Contestant
from sbert_infer.bench.contest.models_under_test import ModelsUnderTest
from sbert_infer.bench.inside.worker import Worker
from sbert_infer.bench.report.results import Results, Row, WorkloadFacts
from sbert_infer.bench.session import Settings, run_session
from sbert_infer.bench.workloads import make_workload


def make_row(
    contestant: str, texts_per_s: float | None, *, status: str = "ok", ours: bool = False, **more: object
) -> Row:
    row = Row("mixed", contestant, "fp32", ours, status=status, texts_per_s=texts_per_s)
    if texts_per_s is not None:
        row.texts_per_s_low, row.texts_per_s_high = 0.9 * texts_per_s, 1.2 * texts_per_s
        row.tokens_per_s, row.seconds = 20 * texts_per_s, [100 / texts_per_s] * 3
        row.min_cosine, row.mean_cosine = 0.9999999, 0.99999999
        row.speed_up = texts_per_s / 100 if status == "ok" else None
        row.latency_ms = {"p50": 5.0, "p95": 7.5, "p99": 11.25}
    for name, value in more.items():
        setattr(row, name, value)
    return row


class WorkerInside:
    """The worker's commands in this process, to save importing torch again."""

    def __init__(self, python: str = "") -> None:
        self._worker = Worker()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        reply: dict[str, Any] = getattr(self._worker, command)(**arguments)
        return reply

    def close(self) -> None:
        """Do nothing: there is no process."""


def write_sts(file: Path) -> Path:
    """Write scored pairs in the STS benchmark's layout."""
    pairs = zip(make_workload("short", 12), make_workload("short", 12, seed=1), strict=True)
    lines = [f"g\tf\ty\t{number}\t{number / 3}\t{a}\t{b}\n" for number, (a, b) in enumerate(pairs)]
    file.write_text("".join(lines), encoding="utf-8")
    return file


def write_beir(folder: Path, texts: int = 30, queries: int = 6, *, overlap: bool = True) -> Path:
    """Write a BEIR folder. A query is words of a document; with `overlap` one has its id, too."""
    (folder / "qrels").mkdir(parents=True)
    made = make_workload("medium", texts)
    ids = [f"d{number}" for number in range(texts)]
    documents = [{"_id": key, "title": text[:9], "text": text[9:]} for key, text in zip(ids, made, strict=True)]
    asked = [{"_id": f"q{number}", "text": " ".join(made[number].split()[8:16])} for number in range(queries)]
    if overlap:
        asked[0]["_id"] = "d0"
    for name, rows in (("corpus", documents), ("queries", asked)):
        content = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(content, encoding="utf-8")
    judged = [
        f"{row['_id']}\td{(number + step) % texts}\t{2 - step}\n" for number, row in enumerate(asked) for step in (0, 1)
    ]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def reranker(once: Callable[..., Path]) -> Path:
    """A small random reranker's checkpoint; its artifact is beside it."""
    from sbert_infer.export.exporter import export
    from tests.models.cross_encoders import write_cross_encoder

    folder = once("bench reranker", "reranker", write_cross_encoder)
    once("bench reranker", "reranker.onnx", lambda target: export(folder, target))
    return folder


@pytest.fixture
def results() -> Results:
    """Made-up figures: ours, the reference, a rival, a wrong one and a failed one."""
    stamp = {
        "date": "2025-01-02 03:04 UTC",
        "sbert_infer": "0.1.0",
        "cpu": "Some CPU <& co>",
        "cores": 2,
        "memory_gb": 8.0,
        "os": "Linux",
        "python": "3.11.0",
        "load_average": 0.0,
        "model": "tiny",
        "weights_sha256": "ab" * 32,
        "max_length": 64,
        "rounds": 3,
        "seed": 0,
        "packages": {"numpy": "2.0"},
        "rivals_python": "3.12.0",
        "rivals_packages": {"fastembed": "0.9"},
        "workloads": ["mixed"],
    }
    rows = [
        make_row(EAGER, 100.0),
        make_row("sbert-infer fp32", 225.5, ours=True, padding=0.015, peak_share=0.7),
        make_row("rival <b>", 107.25, batch_size=32),
        make_row("rival <b>, tuned", 120.0, batch_size=16),
        make_row("liar", 900.0, status="wrong", min_cosine=0.5, reason="cosine with the reference down to 0.5000"),
        make_row("sunk", None, status="failed", reason="killed by SIGILL"),
    ]
    return Results(stamp, [WorkloadFacts("mixed", 100, 2000, 60, 1, 12.5, (200.0, 210.0, 190.0))], rows, ["absentee"])


@pytest.fixture(scope="session")
def real_run(
    make_checkpoint: Callable[..., Path],
    export_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Results:
    """A run on a small random model with three fakes that misbehave."""
    artifact = open_artifact(export_checkpoint("bert"))
    models = ModelsUnderTest("tiny", str(make_checkpoint("bert")), (artifact,))
    fakes = [
        Contestant(f"fake {fault}", "fp32", {"kind": "fake", "fault": fault, "artifact": str(artifact.path)})
        for fault in ("wrong", "crash", "error")
    ]
    folder = tmp_path_factory.mktemp("bench")
    settings = Settings(
        rounds=2,
        latency_texts=12,
        sts=(write_sts(folder / "scored.tsv"),),
        beir=(write_beir(folder / "tiny"),),
        only=("sbert-infer", "onnxruntime", "fake"),
    )
    workloads = {"short": make_workload("short", 30), "mixed": make_workload("mixed", 30)}
    return run_session(models, workloads, settings, folder, extra=fakes)
