"""Who takes part, and with what they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sbert_infer.artifact import open_artifact
from sbert_infer.backends import openvino_install
from sbert_infer.bench.contest.lineup import EAGER, PAIR_RIVALS, RIVALS, TUNED, Contestant, choose, line_up
from sbert_infer.bench.errors import BenchError
from sbert_infer.bench.inside import converters, loaders
from sbert_infer.bench.workloads import make_pairs, make_workload
from sbert_infer.errors import EngineError
from sbert_infer.export.exporter import ExportOptions, export


def test_every_rival_has_a_loader_and_a_converter() -> None:
    assert {rival.spec["kind"] for rival in (*RIVALS, *PAIR_RIVALS)} <= set(loaders.LOADERS)
    assert {rival.converter for rival in RIVALS} <= {"", *converters.CONVERTERS}


def test_the_reference_always_takes_part_and_tunable_rivals_take_part_twice() -> None:
    everyone = [Contestant(EAGER, "fp32", {}), Contestant("a", "fp32", {}, tunable=True), Contestant("b", "fp32", {})]
    assert [one.name for one in choose(everyone, {"b"}, [])] == [EAGER, "a", f"a{TUNED}"]
    assert [one.name for one in choose(everyone, set(), ["b"])] == [EAGER, "b"]
    assert [one.name for one in choose(everyone, set(), ["eager"])] == [EAGER]
    with pytest.raises(BenchError, match=f"--only x leaves nobody; there are: {EAGER}, b"):
        choose(everyone, {"a"}, ["x"])


def test_bf16_that_would_run_in_fp32_is_no_row_of_bf16(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = "this CPU has no BF16 that OpenVINO uses"
    monkeypatch.setattr(openvino_install, "_verdict", lambda: raise_error(EngineError(never)))
    path = tmp_path / "model.bf16.onnx"
    export(make_checkpoint("bert"), path, ExportOptions(bf16=True, max_length=24, min_cosine=0.9))
    ours = next(one for one in line_up([open_artifact(path)], {}) if one.ours)
    with pytest.raises(loaders.UnsupportedError, match=f"OpenVINO does not run it: .* runs in FP32 .*: {never}"):
        loaders.load_engine(dict(ours.spec))


def raise_error(error: Exception) -> None:
    raise error


def test_the_rival_is_called_for_the_same_scores(reranker: Path) -> None:
    """The line-up has it, with a batch size to tune. Runs in this process to save imports."""
    artifact = open_artifact(reranker.with_suffix(".onnx"))
    checkpoint = {"model": str(reranker), "checkpoint": str(reranker), "pairs": True}
    everyone = line_up([artifact], checkpoint)
    assert [one.name for one in everyone] == [EAGER, "sbert-infer fp32", "sentence-transformers CrossEncoder"]
    assert everyone[-1].tunable
    pairs = [list(pair) for pair in make_pairs(make_workload("mixed", 20))]
    ours, theirs = (loaders.LOADERS[one.spec["kind"]](dict(one.spec)) for one in everyone[1:])
    for prompt in (None, "find: "):
        assert np.abs(ours(pairs, 4, prompt) - theirs(pairs, 4, prompt)).max() < 1e-5
