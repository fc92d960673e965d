"""Fingerprints tell which vectors are comparable, on every machine and in every process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.fingerprint import PARTS, Fingerprint, fingerprint


def test_precisions_of_a_checkpoint_share_the_model(export_checkpoint: Callable[..., Path]) -> None:
    fp32, int8, plan = (
        fingerprint(open_artifact(export_checkpoint("bert", **options)))
        for options in ({}, {"int8": True}, {"fp16": True})
    )
    assert fp32.model == int8.model == plan.model
    assert len({fp32.exact, int8.exact, plan.exact}) == 3
    assert fp32.differences(int8) == plan.differences(fp32) == ["precision"]
    assert fp32.differences(fp32) == []


def test_another_checkpoint_is_another_model(export_checkpoint: Callable[..., Path]) -> None:
    bert = fingerprint(open_artifact(export_checkpoint("bert")))
    prompted = fingerprint(open_artifact(export_checkpoint("bert", prompts={"query": "find: "})))
    roberta = fingerprint(open_artifact(export_checkpoint("roberta")))
    assert "weights" in bert.differences(roberta)
    assert "tokenizer" in bert.differences(roberta)
    assert bert.model != roberta.model
    assert bert.differences(prompted) == ["prompts"]


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("weights", {"weights_sha256": "0"}),
        ("pooling", {"pooling": ("cls",)}),
        ("pooling", {"normalized": True}),
        ("pooling", {"include_prompt": True}),
        ("pooling", {"truncation_side": "left"}),
        ("pooling", {"roles": {"query": {"max_length": 8}}}),
        ("pooling", {"activation": "sigmoid"}),
        ("prompts", {"default_prompt_name": "query"}),
        ("limit", {"max_length": 17}),
        ("dimensions", {"truncate_dim": 3}),
        ("precision", {"precision": "int8"}),
    ],
)
def test_each_change_is_named(small_onnx: Path, part: str, changes: dict[str, Any]) -> None:
    artifact = open_artifact(small_onnx)
    changed = replace(artifact, manifest=replace(artifact.manifest, **changes))
    assert fingerprint(artifact).differences(fingerprint(changed)) == [part]


def test_what_does_not_change_vectors_does_not_count(small_onnx: Path) -> None:
    artifact = open_artifact(small_onnx)
    other = replace(artifact.manifest, name="other", versions={}, parity={}, fusion={}, similarity="dot")
    moved = replace(artifact, path=Path("elsewhere.onnx"), manifest=other)
    assert fingerprint(artifact).exact == fingerprint(moved).exact


def test_it_survives_json_and_processes(small_onnx: Path) -> None:
    here = fingerprint(open_artifact(small_onnx))
    code = (
        "import sys; from sbert_infer.artifact import open_artifact; "
        "from sbert_infer.artifact.fingerprint import fingerprint; "
        "print(fingerprint(open_artifact(sys.argv[1])).to_json())"
    )
    there = subprocess.run(
        [sys.executable, "-c", code, str(small_onnx)], capture_output=True, encoding="utf-8", check=True
    ).stdout
    assert Fingerprint.from_json(there) == here
    assert Fingerprint.from_json(here.to_json()).exact == here.exact


def test_its_hashes_never_change() -> None:
    """They stand beside stored vectors: a change here makes all of those look foreign."""
    assert Fingerprint(dict.fromkeys(PARTS, "0123456789abcdef")).exact == "870792844f7b1343"


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"weights": "a"}', "no json"])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="fingerprint|JSON|Expecting"):
        Fingerprint.from_json(text)
