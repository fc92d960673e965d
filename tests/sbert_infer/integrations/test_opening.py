"""How the classes for other libraries open a model, and what they refuse."""

from __future__ import annotations

import importlib
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sbert_infer import Engine, EngineError
from sbert_infer.artifact.manifest import SPARSE_ENCODER
from sbert_infer.integrations.opening import open_engine, written_down

PACKAGES = {
    "bertopic": ("bertopic", "bertopic"),
    "chonkie": ("chonkie", "chonkie"),
    "chroma": ("chromadb", "chromadb"),
    "haystack": ("haystack", "haystack-ai"),
    "keybert": ("keybert", "keybert"),
    "lancedb": ("lancedb", "lancedb"),
    "langchain": ("langchain_core", "langchain-core"),
    "llama_index": ("llama_index", "llama-index-core"),
    "sklearn": ("sklearn", "scikit-learn"),
    "txtai": ("txtai", "txtai"),
}


def test_the_same_name_and_options_are_opened_once(small_onnx: Path) -> None:
    first = open_engine(small_onnx, {"truncate_dim": 8, "on_truncate": "ignore"})
    assert open_engine(str(small_onnx), {"on_truncate": "ignore", "truncate_dim": 8}) is first
    assert first.truncate_dim == 8
    assert open_engine(small_onnx, {}) is not first


def test_files_that_were_replaced_are_opened_anew(
    small_onnx: Path, minilm_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(small_onnx, tmp_path / "model.onnx"))
    first = open_engine(path, {})
    Path(shutil.copy(minilm_onnx, tmp_path / "new.onnx")).replace(path)
    assert open_engine(path, {}).get_embedding_dimension() == 384 != first.get_embedding_dimension()
    for folder, source in (("one", small_onnx), ("two", minilm_onnx)):
        (tmp_path / folder).mkdir()
        shutil.copy(source, tmp_path / folder / "model.onnx")
        monkeypatch.chdir(tmp_path / folder)
        assert (open_engine("model.onnx", {}).get_embedding_dimension() == 384) is (folder == "two")


def test_a_model_that_was_closed_is_opened_anew(small_onnx: Path) -> None:
    first = open_engine(small_onnx, {})
    first.close()
    assert open_engine(small_onnx, {}).encode("a text").shape
    assert first.is_closed


def test_an_engine_is_used_as_it_is(small: Engine) -> None:
    assert open_engine(small, {}) is small
    with pytest.raises(TypeError, match=r"truncate_dim: .* is open already"):
        open_engine(small, {"truncate_dim": 8})


def test_an_unknown_option_is_refused(small_onnx: Path) -> None:
    with pytest.raises(TypeError, match="trunctate_dim"):
        open_engine(small_onnx, {"trunctate_dim": 8})


def test_a_model_without_one_vector_for_a_text_is_refused(small: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "manifest", replace(small.manifest, kind=SPARSE_ENCODER))
    with pytest.raises(EngineError, match=f"is a {SPARSE_ENCODER}, not a model of one vector per text"):
        open_engine(small, {})


def test_only_a_name_can_be_written_down(small: Engine, small_onnx: Path) -> None:
    assert written_down(small_onnx) == str(small_onnx)
    with pytest.raises(EngineError, match="give its path"):
        written_down(small)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_library_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, package = PACKAGES[name]
    for loaded in [each for each in sys.modules if each.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"sbert_infer.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=f"{library} is not installed: pip install {package}$"):
        importlib.import_module(f"sbert_infer.integrations.{name}")


def test_vectors_are_the_engines_own(small: Engine, small_onnx: Path) -> None:
    np.testing.assert_array_equal(open_engine(small_onnx, {}).encode(["a", "b"]), small.encode(["a", "b"]))
