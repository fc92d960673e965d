"""Runs of rerankers, which score pairs of texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sbert_infer.artifact import open_artifact
from sbert_infer.bench import session
from sbert_infer.bench.contest.lineup import EAGER, Contestant
from sbert_infer.bench.contest.models_under_test import ModelsUnderTest
from sbert_infer.bench.errors import BenchError
from sbert_infer.bench.report.page import render_page
from sbert_infer.bench.report.results import Results
from sbert_infer.bench.report.table import render_table
from sbert_infer.bench.session import Settings, run_session
from sbert_infer.bench.workloads import make_workload
from tests.bench.conftest import WorkerInside, write_beir, write_sts


@pytest.fixture(scope="module")
def reranker_run(reranker: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    artifact = open_artifact(reranker.with_suffix(".onnx"))
    spec = {"kind": "fake", "pairs": True, "artifact": str(artifact.path), "error": 0.5}
    folder = tmp_path_factory.mktemp("rerankers")
    settings = Settings(
        rounds=1, latency_texts=5, sts=(write_sts(folder / "scored.tsv"),), only=("sbert-infer", "fake")
    )
    workloads = {"mixed": make_workload("mixed", 20)}
    models = ModelsUnderTest("tiny", str(reranker), (artifact,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "RemoteWorker", WorkerInside)
        return run_session(models, workloads, settings, folder, extra=[Contestant("fake", "fp32", spec)])


def test_rerankers_score_pairs_side_by_side(reranker_run: Results) -> None:
    rows = {row.contestant: row for row in reranker_run.rows}
    assert set(rows) == {EAGER, "sbert-infer fp32", "fake"}
    for row in (rows[EAGER], rows["sbert-infer fp32"]):
        assert row.status == "ok", row.reason
        assert row.max_error is not None
        assert row.max_error < 1e-5
        assert row.texts_per_s
        assert row.peak_share
        assert row.latency_ms
        assert row.quality == pytest.approx(rows[EAGER].quality, abs=5e-5)
    assert reranker_run.workloads[0].texts == 20


def test_wrong_scores_are_shown_as_wrong_though_they_correlate(reranker_run: Results) -> None:
    [row] = [row for row in reranker_run.rows if row.contestant == "fake"]
    assert row.status == "wrong"
    assert row.correlation == pytest.approx(1)
    assert "scores off by up to 0.5" in row.reason


def test_the_report_speaks_of_pairs(reranker_run: Results) -> None:
    table = render_table(reranker_run)
    assert "pairs/s" in table
    assert "max error" in table
    assert "20 pairs" in table
    assert "texts/s" not in table
    assert "pairs per second" in render_page(reranker_run)


def test_a_reranker_searches_no_corpus(reranker: Path, tmp_path: Path) -> None:
    models = ModelsUnderTest("tiny", str(reranker), (open_artifact(reranker.with_suffix(".onnx")),))
    with pytest.raises(BenchError, match="can't search"):
        run_session(models, {}, Settings(beir=(write_beir(tmp_path / "tiny"),)), tmp_path)
