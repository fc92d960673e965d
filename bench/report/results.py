"""The results of a run, as kept in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from sbert_infer._util.files import staged
from sbert_infer.artifact.manifest import RERANKER
from sbert_infer.bench.errors import ResultsError

T = TypeVar("T")

FORMAT_VERSION = 3  # 2: `quality` in place of `spearman`; 3: peaks of BF16 and int8
QUALITY = "quality"  # takes the place of the workload in a run that has none


@dataclass(frozen=True)
class WorkloadFacts:
    """What a workload consists of. Tokens are those that run, without padding."""

    name: str
    texts: int
    tokens: int
    longest: int  # tokens
    truncated: int  # texts
    gflop: float  # 1e9 operations for all texts, without padding
    peak_gflops: tuple[float, ...] = ()  # of the machine's matrix product, once per round
    peak_of: str = "FP32"  # that product's type: FP16 on a GPU
    own_peaks: dict[str, tuple[float, ...]] = field(default_factory=dict)  # the same by further families


@dataclass
class Row:
    """One contestant on one workload. `status` is ok, wrong or failed; `reason` says why not ok."""

    workload: str
    contestant: str
    family: str
    ours: bool
    status: str = "ok"
    reason: str = ""
    note: str = ""
    seconds: list[float] = field(default_factory=list)  # per round
    batch_size: int | None = None
    texts_per_s: float | None = None
    texts_per_s_low: float | None = None
    texts_per_s_high: float | None = None
    tokens_per_s: float | None = None
    speed_up: float | None = None  # against the eager reference, median of the rounds' ratios; None unless ok
    cpu_s_per_1000: float | None = None
    peak_share: float | None = None  # of the machine's FP32 matrix product, 0 to 1; int8 may exceed 1
    own_peak_share: float | None = None  # of that of its own family, if any in the run has another than FP32
    padding: float | None = None  # 0 to 1
    peak_mb: float | None = None
    load_s: float | None = None
    file_mb: float | None = None
    min_cosine: float | None = None
    mean_cosine: float | None = None
    max_error: float | None = None  # of a reranker's scores, before the activation
    correlation: float | None = None  # of a reranker's scores with the reference's, lowest over labels and rounds
    quality: dict[str, float] = field(default_factory=dict)  # "<dataset> <measure>" -> value
    latency_ms: dict[str, float] = field(default_factory=dict)  # p50, p95, p99 of one text at a time


@dataclass
class Results:
    """A whole run."""

    stamp: dict[str, Any]
    workloads: list[WorkloadFacts]
    rows: list[Row]
    not_installed: list[str] = field(default_factory=list)
    format_version: int = FORMAT_VERSION

    def of(self, workload: str) -> list[Row]:
        """List a workload's rows: the right ones by speed, then the wrong, then the failed."""
        order = {"ok": 0, "wrong": 1, "failed": 2}
        rows = [row for row in self.rows if row.workload == workload]
        return sorted(rows, key=lambda row: (order[row.status], -(row.texts_per_s or 0)))

    @property
    def noun(self) -> str:
        """What is encoded: texts, or pairs of texts by a reranker."""
        return "pairs" if self.stamp.get("kind") == RERANKER else "texts"

    @property
    def ours_are_right(self) -> bool:
        """Whether all of our entries ran and gave the right vectors."""
        return all(row.status == "ok" for row in self.rows if row.ours)


def to_json(results: Any) -> str:
    """Serialize results, of any kind, for a JSON file."""
    return json.dumps(asdict(results), indent=1, ensure_ascii=False) + "\n"


def write_reports(results: T, json_file: Path | None, html_file: Path | None, render_page: Callable[[T], str]) -> None:
    """Write the JSON file and the page, if asked for, each completely or not at all."""
    for path, render in ((json_file, to_json), (html_file, render_page)):
        if path is not None:
            with staged(path) as file:
                file.path.write_text(render(results), encoding="utf-8")
                file.commit()


def load_results(path: Path) -> Results:
    """Read a JSON file of `Results`."""
    try:
        content = dict(json.loads(path.read_text(encoding="utf-8")))
        if content["format_version"] > FORMAT_VERSION:
            found = content["format_version"]
            raise ResultsError(f"{path}: results format {found}, this sbert-bench reads up to {FORMAT_VERSION}")
        content["workloads"] = [_facts(one) for one in content["workloads"]]
        content["rows"] = [_row(row) for row in content["rows"]]
        return Results(**{entry.name: content[entry.name] for entry in fields(Results)})
    except (KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"{path} does not hold results of sbert-bench ({type(error).__name__}: {error})") from error


def _facts(entries: dict[str, Any]) -> WorkloadFacts:
    own = {family: tuple(peaks) for family, peaks in entries.get("own_peaks", {}).items()}
    return WorkloadFacts(**{**entries, "peak_gflops": tuple(entries["peak_gflops"]), "own_peaks": own})


def _row(entries: dict[str, Any]) -> Row:
    found = entries.pop("spearman", None)  # in format 1
    row = Row(**entries)
    if found is not None:
        row.quality["Spearman"] = found
    return row
