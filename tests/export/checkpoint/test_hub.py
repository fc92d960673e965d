"""Checkpoints of the hub: which files are fetched, and what happens without a network."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils._validators import validate_repo_id

from sbert_infer.errors import CheckpointError
from sbert_infer.export.checkpoint.hub import needed_files
from sbert_infer.export.checkpoint.reader import read_checkpoint

MakeCheckpoint = Callable[..., Path]


def test_needed_files() -> None:
    wanted = ["config.json", "model.safetensors", "vocab.txt", "spiece.model", "2_Dense/pytorch_model.bin"]
    wanted += ["artifact.metadata", "sparse_linear.pt"]
    unwanted = [
        *("pytorch_model.bin", "training_args.bin", "tf_model.h5", "rust_model.ot", "README.md", "modeling.py"),
        *("onnx/model.onnx", "onnx/config.json", "openvino/openvino_model.bin", "pytorch_model.bin.md"),
    ]
    assert needed_files([*wanted, *unwanted]) == wanted
    assert needed_files(["pytorch_model.bin", "modeling.py"]) == ["pytorch_model.bin"]
    assert needed_files(["modeling.py"], trust_remote_code=True) == ["modeling.py"]


class FakeHub:
    """The hub with one repository, whose files are those of a local folder."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.asked: list[tuple[str, str | None]] = []

    def model_info(self, repo_id: str, revision: str | None, timeout: float) -> Any:
        self.asked.append((repo_id, revision))
        names = [str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file()]
        return SimpleNamespace(sha="c" * 40, siblings=[SimpleNamespace(rfilename=name) for name in names])

    def snapshot_download(self, repo_id: str, revision: str, allow_patterns: list[str]) -> str:
        self.asked.append((repo_id, revision))
        for name in allow_patterns:
            (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.folder / name, self.cache / name)
        return str(self.cache)


class Offline:
    """The hub without a network."""

    def model_info(self, repo_id: str, revision: str | None, timeout: float) -> Any:
        validate_repo_id(repo_id)
        raise ConnectionError("no network\nmore")


def test_hub_id(make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(make_checkpoint(layout="old"), tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    checkpoint = read_checkpoint("someone/some-model")
    assert (checkpoint.name, checkpoint.source, checkpoint.path) == ("some-model", "someone/some-model", tmp_path)
    assert hub.asked == [
        ("someone/some-model", None),
        ("someone/some-model", "c" * 40),
    ]  # one commit
    assert read_checkpoint("some-model@v2").name == "some-model"
    assert hub.asked[2] == ("sentence-transformers/some-model", "v2")


def test_hub_id_from_the_cache(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revision = "a" * 40
    repository = tmp_path / "models--someone--some-model"
    snapshot = Path(shutil.copytree(make_checkpoint(), repository / "snapshots" / revision))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision, encoding="utf-8")
    monkeypatch.setattr(huggingface_hub, "HfApi", Offline)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert read_checkpoint("someone/some-model").path == snapshot


@pytest.mark.parametrize("source", ["someone/some-model", "./no/such/folder", "no such name"])
def test_not_found(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Offline)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="neither a folder here nor a model") as caught:
        read_checkpoint(source)
    assert len(caught.value.problems) == 1
    assert "\n" not in caught.value.problems[0]
