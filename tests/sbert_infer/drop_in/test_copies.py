"""Copies and pickles of an engine open the same file with the same settings."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib  # type: ignore[import-untyped]  # has no types
import numpy as np
import pytest
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline

from sbert_infer import Engine, EngineError, Reranker
from tests.models.checkpoints import TEXTS

MakeArtifact = Callable[..., Path]


# Run with the pickled engine as its input.
ENCODE = f"import json, pickle, sys; print(json.dumps(pickle.load(sys.stdin.buffer).encode({TEXTS!r}).tolist()))"


def test_settings_come_along(export_checkpoint: MakeArtifact) -> None:
    with Engine(export_checkpoint(), on_truncate="ignore", workers=1) as engine:
        engine.max_seq_length, engine.truncate_dim, engine.similarity_fn_name = 5, 16, "dot"
        engine.prompts["query"], engine.default_prompt_name = "find: ", "query"
        expected = engine.encode(TEXTS)
        for other in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):  # noqa: S301  # our own
            with other:
                assert other is not engine
                assert other.prompts == engine.prompts
                assert other.prompts is not engine.prompts
                assert (other.max_seq_length, other.similarity_fn_name) == (5, "dot")
                assert (other.on_truncate, other.info["workers"]) == ("ignore", 1)
                assert np.array_equal(other.encode(TEXTS), expected)
        assert engine.encode(TEXTS).shape == (len(TEXTS), 16)  # the first is as it was


def test_joblib_files(export_checkpoint: MakeArtifact, tmp_path: Path) -> None:
    with Engine(export_checkpoint(), on_truncate="ignore") as engine:
        engine.truncate_dim = 16
        joblib.dump({"encoder": engine}, tmp_path / "pipeline.joblib")
        with joblib.load(tmp_path / "pipeline.joblib")["encoder"] as other:
            assert np.array_equal(other.encode(TEXTS), engine.encode(TEXTS))


def test_another_process_in_another_folder(
    export_checkpoint: MakeArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(export_checkpoint(), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    with Engine("model.onnx") as engine:
        command = [sys.executable, "-c", ENCODE]
        there = subprocess.run(command, input=pickle.dumps(engine), cwd="/", stdout=subprocess.PIPE, check=True)
        assert np.array_equal(np.float32(json.loads(there.stdout)), engine.encode(TEXTS))


def test_reranker(reranker_onnx: Path) -> None:
    with Reranker(reranker_onnx) as reranker:
        reranker.activation_fn = "sigmoid"
        with copy.deepcopy(reranker) as other:
            assert np.array_equal(other.predict([("a", "b")]), reranker.predict([("a", "b")]))


def test_scikit_learn_clones(export_checkpoint: MakeArtifact) -> None:
    class Encoder(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
        def __init__(self, engine: Engine) -> None:
            self.engine = engine

    with Engine(export_checkpoint()) as engine, clone(Encoder(engine)).engine as other:
        assert np.array_equal(other.encode(TEXTS), engine.encode(TEXTS))


class Features(TransformerMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Vectors of texts, for a pipeline of scikit-learn."""

    def __init__(self, engine: Engine | None = None, truncate_dim: int | None = None) -> None:
        self.engine, self.truncate_dim = engine, truncate_dim

    def fit(self, texts: Any, labels: Any = None) -> Features:
        return self

    def transform(self, texts: Any) -> Any:
        assert self.engine is not None
        return self.engine.encode(texts, truncate_dim=self.truncate_dim)


def test_scikit_learn_in_threads(export_checkpoint: MakeArtifact) -> None:
    with joblib.parallel_config(backend="threading"):  # processes could not import this module
        texts, labels = [*TEXTS, *TEXTS], [0, 1] * len(TEXTS)
        with Engine(export_checkpoint(), on_truncate="ignore", workers=1) as engine:
            model = make_pipeline(Features(engine), LogisticRegression())
            alone = cross_val_score(model, texts, labels, cv=2)
            assert np.array_equal(cross_val_score(model, texts, labels, cv=2, n_jobs=2), alone)
            search = GridSearchCV(model, {"features__truncate_dim": [2, None]}, cv=2, n_jobs=2).fit(texts, labels)
            assert search.best_score_ >= alone.mean()
            assert np.array_equal(search.predict(TEXTS), search.predict(TEXTS))


def test_datasets_in_processes(export_checkpoint: MakeArtifact) -> None:
    from datasets import Dataset

    with Engine(export_checkpoint(), on_truncate="ignore", workers=1) as engine:
        rows = Dataset.from_dict({"text": TEXTS})
        found = rows.map(lambda batch: {"vector": engine.encode(batch["text"])}, batched=True, num_proc=2)
        assert np.array_equal(np.float32(found["vector"][:]), engine.encode(TEXTS))


def test_a_closed_engine(export_checkpoint: MakeArtifact) -> None:
    engine = Engine(export_checkpoint())
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        pickle.dumps(engine)


def test_another_file_meanwhile(export_checkpoint: MakeArtifact, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    shutil.copy(export_checkpoint(), path)
    with Engine(path) as engine:
        pickled = pickle.dumps(engine)
    shutil.copy(export_checkpoint(int8=True), path)
    with pytest.raises(EngineError, match=r"model\.onnx is another model"):
        pickle.loads(pickled)  # noqa: S301  # our own
