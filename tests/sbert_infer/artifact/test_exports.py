"""From the name of a checkpoint to an open artifact: exported once, then found in the cache."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from sbert_infer import ArtifactError, Engine, EngineError, ExportError, Reranker
from sbert_infer.artifact import exports
from sbert_infer.artifact.exports import open_model
from sbert_infer.artifact.hub import HubModel

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SBERT_INFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache" / "exports"


class Exporter:
    """Takes the place of the export, which takes seconds: copies an artifact, and counts."""

    def __init__(self, artifact: Path) -> None:
        self.artifact, self.sources = artifact, list[str]()

    def __call__(self, source: str, file: Path, precision: str) -> None:
        self.sources.append(source)
        shutil.copy(self.artifact, file)


@pytest.fixture
def exporter(small_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> Exporter:
    double = Exporter(small_onnx)
    monkeypatch.setattr(exports, "_export", double)
    return double


class Hub:
    """The hub: which commit each revision of one repository is."""

    def __init__(self, **commits: str) -> None:
        self.commits = commits

    def model_info(self, repository: str, *, revision: str | None, timeout: float) -> Any:
        if repository != "someone/model" or (revision or "main") not in self.commits:
            raise ValueError(f"404: {repository} {revision} was not found\nmore")
        return SimpleNamespace(sha=self.commits[revision or "main"], siblings=[])


def use_hub(monkeypatch: pytest.MonkeyPatch, **commits: str) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Hub(**commits))


def test_a_folder_becomes_vectors(
    make_checkpoint: MakeCheckpoint, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint("bert")
    with Engine(str(folder)) as engine:
        first = engine.encode("A cat sat.")
        assert engine.artifact.path.is_relative_to(cache)
        assert (engine.manifest.name, engine.manifest.precision) == (folder.name, "fp32")
    said = [record.message for record in caplog.records if record.name == exports.__name__]
    assert [line.split(" (")[0] for line in said] == [f"exporting {folder}"]
    program = (
        "import sys, json; from sbert_infer import Engine; "
        f"print(json.dumps(Engine({str(folder)!r}).encode('A cat sat.').tolist())); "
        "assert not {'torch', 'transformers', 'onnx'} & set(sys.modules)"
    )
    again = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert json.loads(again.stdout) == first.tolist()
    assert "exporting" not in again.stderr


def test_a_changed_folder_is_exported_again(copy_checkpoint: MakeCheckpoint, exporter: Exporter) -> None:
    folder = copy_checkpoint("bert")
    first = open_model(folder).path
    (folder / "README.md").write_text("not read by an export", encoding="utf-8")
    assert open_model(folder).path == first
    assert len(exporter.sources) == 1
    settings = folder / "config_sentence_transformers.json"
    settings.write_text(settings.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert open_model(folder).path != first
    assert len(exporter.sources) == 2


def test_an_adapter_is_exported_again_when_its_base_has_changed(
    copy_checkpoint: MakeCheckpoint, exporter: Exporter, tmp_path: Path
) -> None:
    base, adapted = copy_checkpoint("bert"), tmp_path / "adapted"
    adapted.mkdir()
    (adapted / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}), encoding="utf-8")
    first = open_model(adapted).path
    assert open_model(adapted).path == first
    config = base / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert open_model(adapted).path != first
    assert len(exporter.sources) == 2


def test_each_precision_has_its_own_export(make_checkpoint: MakeCheckpoint, exporter: Exporter) -> None:
    folder = make_checkpoint("bert")
    files = [open_model(folder, model_precision=name).path for name in ("fp32", "int8", "int8")]
    assert [file.suffixes[-2:] for file in files[:2]] == [[".fp32", ".onnx"], [".int8", ".onnx"]]
    assert (files[1], len(exporter.sources)) == (files[2], 2)


def test_a_damaged_export_is_made_again(make_checkpoint: MakeCheckpoint, exporter: Exporter) -> None:
    folder = make_checkpoint("bert")
    file = open_model(folder).path
    file.write_bytes(file.read_bytes()[:-1])
    assert open_model(folder).manifest.dim == 32
    assert len(exporter.sources) == 2


def test_two_processes_export_once(make_checkpoint: MakeCheckpoint, small_onnx: Path, tmp_path: Path) -> None:
    program = f"""
import shutil, sys
from pathlib import Path
from sbert_infer.artifact import exports

def export(source, file, precision):
    print("exporting", flush=True)
    sys.stdin.readline()
    shutil.copy({str(small_onnx)!r}, file)

exports._export = export
exports.logger.warning = lambda text, *values: print(text.split()[0], flush=True)
print(exports.open_model({str(make_checkpoint("bert"))!r}).path)
"""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    first = subprocess.Popen([sys.executable, "-c", program], **pipes)
    assert first.stdout is not None
    assert first.stdout.readline() == "exporting\n"
    second = subprocess.Popen([sys.executable, "-c", program], **pipes)
    assert second.stdout is not None
    assert second.stdout.readline() == "waiting\n"
    path, _ = first.communicate("go on\n")
    assert second.communicate("\n")[0] == path  # and it did not export


def test_a_name_is_one_commit(exporter: Exporter, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, main="a" * 40, v1="b" * 40)
    newest = open_model("someone/model").path
    assert newest.parent == cache / "someone--model"
    assert newest.name.startswith("a" * 20)
    tagged = open_model("someone/model", revision="v1").path
    assert tagged == open_model("someone/model@v1").path == open_model("someone/model", revision="b" * 40).path
    assert exporter.sources == [f"someone/model@{'a' * 40}", f"someone/model@{'b' * 40}"]
    use_hub(monkeypatch, main="c" * 40)
    assert open_model("someone/model").path.name.startswith("c" * 20)


def test_without_a_network(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, main="a" * 40)
    path = open_model("someone/model").path
    monkeypatch.undo()
    monkeypatch.setenv("SBERT_INFER_CACHE", str(path.parents[2]))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(path.parents[2] / "hub"))
    assert open_model("someone/model").path == path  # the one exported last
    assert open_model("someone/model", revision="a" * 40).path == path
    with pytest.raises(ArtifactError, match="other: neither a file or folder here nor a model") as caught:
        open_model("someone/other")
    assert "\n" not in str(caught.value)
    with pytest.raises(ArtifactError, match="model@v9: neither"):
        open_model("someone/model@v9")


def test_from_an_earlier_download(exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--sentence-transformers--small"
    (repository / "snapshots" / ("d" * 40)).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("d" * 40, encoding="utf-8")
    assert open_model("small").path.name.startswith("d" * 20)


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_the_export(
    missing: str, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    real = importlib.import_module

    def import_module(name: str) -> Any:
        if name.startswith("sbert_infer.export"):
            raise ModuleNotFoundError(name=missing)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ExportError, match=rf"{missing} is not installed: pip install 'sbert-infer\[export\]'"):
        Engine(make_checkpoint("bert"))


def test_wrong_arguments(small_onnx: Path, make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ValueError, match=r"revision is for a checkpoint, but .*onnx is a file"):
        Engine(small_onnx, revision="main")
    with pytest.raises(ValueError, match="model_precision is for a checkpoint"):
        Engine(small_onnx, model_precision="int8")
    with pytest.raises(ValueError, match="model_precision must be one of fp32, int8"):
        Engine(small_onnx, model_precision="int4")
    with pytest.raises(ValueError, match="revision is for models of the hub"):
        Engine(make_checkpoint("bert"), revision="main")


def test_a_path_that_leads_nowhere() -> None:
    for path in ("nothing/here.onnx", "folder/", "./no such folder/", Path("./someone/model")):
        with pytest.raises(FileNotFoundError, match="give a file of sbert-export") as raised:
            Engine(path)
        assert raised.value.filename == str(path)


def test_another_kind(make_checkpoint: MakeCheckpoint, exporter: Exporter) -> None:
    with pytest.raises(ArtifactError, match="open it with Engine, not with Reranker"):
        Reranker(make_checkpoint("bert"))


def test_a_cache_that_cannot_be_written(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SBERT_INFER_CACHE", str(tmp_path / "file"))
    with pytest.raises(EngineError, match="SBERT_INFER_CACHE"):
        Engine(make_checkpoint("bert"))


def test_names() -> None:
    assert HubModel.parse("all-MiniLM-L6-v2") == HubModel("all-MiniLM-L6-v2")
    assert HubModel.parse("BAAI/bge-small-en-v1.5@refs/pr/3") == HubModel("BAAI/bge-small-en-v1.5", "refs/pr/3")
    assert [HubModel.parse(text) for text in ("", "a b", "../a", "/a", "a/b/c", "a\\b", "C:\\x", "a@")] == [None] * 8
