"""`SentenceEncoder` in scikit-learn's pipelines."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.validation import check_is_fitted

from sbert_infer import Engine
from sbert_infer.integrations.sklearn import SentenceEncoder

TEXTS = [f"{word} {number}" for number in range(6) for word in ("cats and dogs", "shares and bonds")]
LABELS = ["animals", "money"] * 6


def test_vectors_are_the_engines_own(small: Engine, small_onnx: Path) -> None:
    for encoder in (SentenceEncoder(small_onnx), SentenceEncoder(small)):
        np.testing.assert_array_equal(encoder.transform(TEXTS), small.encode(TEXTS))
        np.testing.assert_array_equal(encoder.fit_transform(np.array(TEXTS, object)), small.encode(TEXTS))
    options: dict[str, Any] = {"prompt_name": "query", "normalize_embeddings": True, "truncate_dim": 8}
    found = SentenceEncoder(small_onnx, **options).transform(TEXTS)
    np.testing.assert_array_equal(found, small.encode(TEXTS, **options))
    assert SentenceEncoder(small_onnx, options={"truncate_dim": 4}).transform(TEXTS).shape == (12, 4)


@pytest.mark.parametrize("copied", [clone, lambda encoder: pickle.loads(pickle.dumps(encoder))])  # noqa: S301
def test_copies_hold_the_path_and_the_settings(copied: Any, small_onnx: Path, small: Engine) -> None:
    encoder = SentenceEncoder(small_onnx, prompt_name="query", options={"on_truncate": "ignore"}).fit(TEXTS)
    again = copied(encoder)
    assert again.get_params() == encoder.get_params()
    assert again.engine is encoder.engine
    np.testing.assert_array_equal(copied(SentenceEncoder(small)).transform(TEXTS), small.encode(TEXTS))
    assert len(pickle.dumps(encoder)) < 1000


def test_there_is_nothing_to_fit(small_onnx: Path) -> None:
    check_is_fitted(SentenceEncoder(small_onnx))
    with pytest.raises(NotFittedError):
        check_is_fitted(LogisticRegression())
    with pytest.raises(FileNotFoundError):
        SentenceEncoder("missing.onnx").fit(TEXTS)


def test_frames_have_a_column_for_each_dimension(small_onnx: Path) -> None:
    frame = SentenceEncoder(small_onnx, truncate_dim=3).set_output(transform="pandas").transform(TEXTS)
    assert list(frame.columns) == ["sentenceencoder0", "sentenceencoder1", "sentenceencoder2"]
    whole = SentenceEncoder(small_onnx, truncate_dim=1000).set_output(transform="pandas").transform(TEXTS)
    with Engine(small_onnx) as engine:
        assert whole.shape == (len(TEXTS), engine.manifest.dim)  # no more than there are


def test_a_grid_is_searched(minilm_onnx: Path) -> None:
    pipeline = make_pipeline(SentenceEncoder(minilm_onnx), LogisticRegression())
    grid = {"sentenceencoder__truncate_dim": [2, None], "logisticregression__C": [1.0, 10.0]}
    search = GridSearchCV(pipeline, grid, cv=2, n_jobs=1).fit(TEXTS, LABELS)
    assert search.best_score_ == 1.0
    assert search.predict(["kittens", "the stock market"]).tolist() == ["animals", "money"]
