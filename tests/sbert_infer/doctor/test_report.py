"""The report about an artifact whose vectors are wrong here."""

from __future__ import annotations

from pathlib import Path

import pytest

from sbert_infer.backends.onnxruntime_cpu import OnnxBackend
from sbert_infer.doctor import trial
from sbert_infer.doctor.machine import look_at_machine
from sbert_infer.doctor.packages import look_at_packages
from sbert_infer.doctor.render import render
from sbert_infer.doctor.report import make_report
from sbert_infer.encode import self_check


@pytest.mark.parametrize("run", [False, True])
def test_wrong_vectors_are_a_problem_with_a_cure(
    small_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: bool
) -> None:
    monkeypatch.setenv("SBERT_INFER_CACHE", str(tmp_path))
    monkeypatch.setattr(self_check, "_seen", {})
    forward = OnnxBackend.run
    monkeypatch.setattr(OnnxBackend, "run", lambda *a, **o: [found + 1 for found in forward(*a, **o)])
    tried = trial.try_artifact(small_onnx, run=run)
    found = make_report(look_at_machine(), look_at_packages(), tried)
    (problem,) = [each for each in found["problems"] if each["name"] == "wrong-vectors"]
    assert "gives wrong vectors here: lowest cosine" in problem["what"]
    assert problem["cure"].startswith("export it again")
    assert problem["cure"] not in problem["what"]
    assert "vectors        wrong, against" in render(found)
