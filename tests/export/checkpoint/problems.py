"""What the tests of checkpoints share: reading one that must fail, and breaking one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbert_infer.errors import CheckpointError
from sbert_infer.export.checkpoint.reader import read_checkpoint

POOLING = "1_Pooling/config.json"
SETTINGS = "sentence_bert_config.json"
MODEL = "config_sentence_transformers.json"


def problems_of(path: Path, **options: Any) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path, **options)
    return caught.value.problems


def the_problem(path: Path, **options: Any) -> str:
    problems = problems_of(path, **options)
    assert len(problems) == 1, problems
    return problems[0]


def edit_modules(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    file = path / "modules.json"
    entries = json.loads(file.read_text(encoding="utf-8"))
    change(entries)
    file.write_text(json.dumps(entries), encoding="utf-8")
