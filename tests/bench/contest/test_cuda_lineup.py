"""Who takes part on a GPU. There is none here: nobody is loaded on one, and nothing is timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.plan_file import Plan, open_plan
from sbert_infer.bench import session
from sbert_infer.bench.contest import models_under_test
from sbert_infer.bench.contest.cuda_lineup import FLASH, cuda_line_up
from sbert_infer.bench.contest.lineup import EAGER, PACKAGES, TUNED, Contestant, choose, not_installed
from sbert_infer.bench.contest.models_under_test import ModelsUnderTest, open_models
from sbert_infer.bench.contest.rounds import Contest
from sbert_infer.bench.errors import BenchError
from sbert_infer.bench.inside import loaders
from sbert_infer.bench.report.verdict import score_quality
from sbert_infer.bench.session import Settings, Surroundings, run_session
from tests.models.checkpoints import TEXTS

KNOWN = {"model": "here", "checkpoint": "here"}
KERNEL, GRAPH = (f"sbert-infer fp16, TensorRT, pooling in the {place}" for place in ("kernel", "graph"))
WITHOUT = "sbert-infer fp16, onnxruntime"


@pytest.fixture
def small_onnx(export_checkpoint: Callable[..., Path]) -> Path:
    return export_checkpoint("bert")


@pytest.fixture
def small_plan(export_checkpoint: Callable[..., Path]) -> Path:
    return export_checkpoint("bert", fp16=True)


@pytest.fixture
def plan(small_plan: Path) -> Plan:
    return open_plan(small_plan)


@pytest.fixture
def everyone(plan: Plan, small_onnx: Path) -> list[Contestant]:
    return cuda_line_up([plan, replace(plan, pooling="kernel"), open_artifact(small_onnx)], KNOWN, {})


def test_who_takes_part(everyone: list[Contestant]) -> None:
    names = [one.name for one in everyone]
    ours = [GRAPH, KERNEL, WITHOUT, "sbert-infer fp32, onnxruntime"]
    assert names == [EAGER, f"{EAGER} fp16", *ours, FLASH.name]
    assert [one.name for one in everyone if one.ours] == ours
    assert {one.spec["device"] for one in everyone} == {"cuda"}
    assert [one.spec["dtype"] for one in everyone[:2]] == ["float32", "float16"]
    assert {one.spec["kind"] for one in everyone} <= set(loaders.LOADERS)


def test_rivals_may_choose_large_batches(everyone: list[Contestant]) -> None:
    tuned = {one.name: max(one.batch_sizes) for one in choose(everyone, set(), []) if one.tuned}
    assert tuned == {f"{EAGER} fp16{TUNED}": 512, f"{FLASH.name}{TUNED}": 512}


def test_flash_attention_must_be_installed(everyone: list[Contestant]) -> None:
    versions = {"sentence-transformers": "6.0", "onnxruntime-gpu": "1.30"}
    assert not_installed(everyone, versions, versions) == {FLASH.name}
    assert not_installed(everyone, {}, {**versions, "flash-attn": "2.8"}) == set()
    assert set(FLASH.needs) <= set(PACKAGES)  # whose versions are asked for


def test_rerankers_have_no_line_up(reranker: Path) -> None:
    with pytest.raises(BenchError, match="rerankers are measured on CPUs"):
        cuda_line_up([open_artifact(reranker.with_suffix(".onnx"))], KNOWN, {})


def test_a_model_that_the_kernel_can_not_pool_is_a_row_with_the_reason(
    small_onnx: Path, plan: Plan, tmp_path: Path
) -> None:
    (out,) = [one for one in cuda_line_up([plan], KNOWN, {"kernel": "it has cls pooling"}) if one.name == KERNEL]
    reference = Contestant("reference", "fp32", {"kind": "engine", "artifact": str(small_onnx), "device": "cpu"})
    with closing(Contest(tmp_path)) as contest:
        contest.enter(reference)
        contest.enter(out)
        contest.start_workload(TEXTS)
        contest.vectors(contest.entrants[0], None)
        rows = score_quality(contest.entrants)
    assert [(row.status, row.reason) for row in rows] == [("ok", ""), ("failed", "it has cls pooling")]
    assert not rows[1].ours  # so that it does not decide the exit code


# Around it ----------------------------------------------------------------------------------------


def around(gpu: str) -> Surroundings:
    return Surroundings(ours={}, theirs={}, theirs_python="", checkpoint=dict(KNOWN), gpu=gpu, flops=[])


def test_a_machine_without_a_gpu(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = ModelsUnderTest("model", "here", (plan,))
    monkeypatch.setattr(session, "_look_around", lambda *_, **__: around(""))
    with pytest.raises(BenchError, match="--device cuda: PyTorch sees no GPU here"):
        run_session(models, {"short": TEXTS}, Settings(device="cuda"), tmp_path)


def test_the_device_chooses_the_line_up(plan: Plan) -> None:
    models = ModelsUnderTest("model", "here", (plan,), {"kernel": "why"})
    names = {
        device: [one.name for one in session._line_up(models, Settings(device=device), around("a GPU"))]
        for device in ("cpu", "cuda")
    }
    assert "sbert-infer fp16" in names["cpu"]
    assert not {GRAPH, KERNEL, WITHOUT} & set(names["cpu"])
    assert {GRAPH, KERNEL, WITHOUT} <= set(names["cuda"])


@pytest.mark.parametrize("kernel", [True, False])
def test_a_checkpoint_is_exported_with_both_kinds_of_pooling(
    small_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: bool
) -> None:
    def export(source: str, target: Path, flags: list[str]) -> str:
        if "kernel" in flags and not kernel:
            return "--pooling kernel takes the mean"
        target.write_bytes(small_plan.read_bytes())
        return ""

    monkeypatch.setattr(models_under_test, "_export", export)
    models = open_models(["somewhere"], None, tmp_path, device="cuda")
    assert [one.path.name for one in models.artifacts] == ["model.plan", *["kernel.plan"] * kernel]
    assert models.not_exported == ({} if kernel else {"kernel": "--pooling kernel takes the mean"})


# Loaders ------------------------------------------------------------------------------------------


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test have the imports of its own process afterwards."""
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))


@pytest.mark.usefixtures("modules")
def test_an_entry_runs_with_what_its_name_says(small_plan: Path) -> None:
    spec: dict[str, Any] = {"artifact": str(small_plan), "device": "cpu"}
    right = loaders.load_engine(spec)(list(TEXTS), None, None)
    np.testing.assert_array_equal(loaders.load_engine({**spec, "runs": "onnxruntime"})(list(TEXTS), None, None), right)
    with pytest.raises(ImportError):
        __import__("tensorrt_rtx")
    with pytest.raises(loaders.UnsupportedError, match="tensorrt does not run it: it runs with onnxruntime"):
        loaders.load_engine({**spec, "runs": "tensorrt"})
    no_driver = {key: value for key, value in spec.items() if key != "device"}
    with pytest.raises(loaders.UnsupportedError, match=r"tensorrt does not run it: .*\.plan runs with onnxruntime"):
        loaders.load_engine({**no_driver, "runs": "tensorrt"})


def test_padding_that_can_not_be_left_out_is_no_contestant(make_checkpoint: Callable[..., Path]) -> None:
    spec = {"kind": "sentence-transformers", "model": str(make_checkpoint()), "backend": "torch", "unpadded": True}
    with pytest.raises(loaders.UnsupportedError, match="can't leave out the padding"):
        loaders.load_sentence_transformers(spec)
