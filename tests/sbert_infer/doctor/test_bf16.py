"""What `sbert-doctor` says about BF16 on CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from sbert_infer.backends.select import OPENVINO
from sbert_infer.doctor import packages, trial
from sbert_infer.doctor.report import make_report
from tests.sbert_infer.doctor.test_problems import CPU_ONLY, FOR_CPUS
from tests.sbert_infer.doctor.test_problems import packages as only


@pytest.mark.parametrize(
    ("why", "cure"),
    [
        ("OpenVINO is not installed: pip install 'sbert-infer[openvino]'", "pip install 'sbert-infer[openvino]'"),
        ("this CPU has no BF16 that OpenVINO uses", "export it without --bf16, or accept FP32"),
    ],
)
def test_a_bf16_file_in_fp32_is_a_problem(why: str, cure: str) -> None:
    well = only(FOR_CPUS, onnxruntimes=("onnxruntime",))
    passed = [{"choice": OPENVINO, "why": why}]
    artifact = trial._nothing(Path("model.bf16.onnx")) | {"uses": "onnxruntime", "passed_over": passed}
    (found,) = make_report(CPU_ONLY, well, artifact)["problems"]
    assert found["name"] == "no-bf16"
    assert found["what"] == f"model.bf16.onnx runs in FP32: {why.partition(':')[0]}"
    assert found["cure"] == cure


def test_bf16_on_this_cpu_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What OpenVINO says of its capabilities is not enough: some CPUs announce AMX, and crash."""
    monkeypatch.setattr(packages, "probe", lambda module: ({"version": "2026.4.1"}, None))
    for why, runs in ((None, True), ("OpenVINO crashes on this CPU (SIGILL)", False)):
        monkeypatch.setattr(packages, "why_no_bf16", lambda why=why: why)
        assert packages.look_at_packages()["openvino"].facts == {"bf16": runs}
