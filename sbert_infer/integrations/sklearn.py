"""A transformer for scikit-learn: `make_pipeline(SentenceEncoder("model.onnx"), classifier)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.engine import Engine
from sbert_infer.integrations.opening import Model, missing, open_engine

try:
    from sklearn.base import BaseEstimator, TransformerMixin
except ImportError as error:
    raise missing(error, "scikit-learn") from error


class SentenceEncoder(TransformerMixin, BaseEstimator):
    """Turns texts into vectors. There is nothing to fit.

    `model` is an `Engine`, or what one opens with the keyword options `options`; the others are
    arguments of `Engine.encode`, and can be searched: `GridSearchCV(pipeline,
    {"sentenceencoder__truncate_dim": [64, None]})`. Give the path rather than an engine there:
    copies of an estimator copy the engine, too, while a path is opened once in a process.
    """

    def __init__(
        self,
        model: Model,
        *,
        prompt_name: str | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.prompt_name = prompt_name
        self.normalize_embeddings = normalize_embeddings
        self.truncate_dim = truncate_dim
        self.options = options

    @property
    def engine(self) -> Engine:
        """The engine, opened when it is first needed."""
        return open_engine(self.model, self.options or {})

    def fit(self, X: Iterable[str], y: Any = None) -> SentenceEncoder:  # noqa: N803  as scikit-learn names it
        """Open the engine."""
        _ = self.engine
        return self

    def transform(self, X: Iterable[str]) -> npt.NDArray[np.float32]:  # noqa: N803
        """Encode texts."""
        vectors: npt.NDArray[np.float32] = self.engine.encode(
            list(X),
            prompt_name=self.prompt_name,
            normalize_embeddings=self.normalize_embeddings,
            truncate_dim=self.truncate_dim,
        )
        return vectors

    def get_feature_names_out(self, input_features: Any = None) -> npt.NDArray[np.object_]:
        """Return the names of the dimensions, for `set_output`."""
        dim = self.engine.resolve_dim(self.truncate_dim)
        return np.array([f"sentenceencoder{index}" for index in range(dim)], dtype=object)

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        tags.input_tags.two_d_array, tags.input_tags.string = False, True
        return tags
