"""`Reranker`: opens an exported cross-encoder and scores pairs of texts, with the interface of `CrossEncoder`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import RERANKER, Manifest
from sbert_infer.backends.devices import Device
from sbert_infer.encode.pipeline import EncodeStats
from sbert_infer.encode.results import check_running, progress_bar, to_torch
from sbert_infer.engine import Engine
from sbert_infer.text.inputs import as_pairs, check_pairs, check_text
from sbert_infer.types import OnTruncate, Pair

__all__ = ["PairEngine", "Reranker", "activate", "softmax"]

Scores = npt.NDArray[np.float32]
Activation = str | Callable[[Any], Any]


class PairEngine(Engine):
    """An engine whose texts are pairs, and whose vectors are their scores as the model gives them, [pairs, labels]."""

    _kinds, _name = (RERANKER,), "Reranker"


class Reranker:
    """Scores pairs of texts with an exported cross-encoder.

    >>> reranker = Reranker("reranker.onnx")                                              # doctest: +SKIP
    >>> reranker.rank("Who sat?", ["Rain fell all day.", "A cat sat on the mat."], 1)     # doctest: +SKIP
    [{'corpus_id': 1, 'score': 0.98}]

    A score does not depend on which other pairs are scored with it. One reranker may be used from
    many threads.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: Device = None,
        on_truncate: OnTruncate = "warn",
        workers: int | None = None,
        threads: int | None = None,
        max_batch_tokens: int | None = None,
    ) -> None:
        """Open the artifact at `path`, which `sbert-export` made of a cross-encoder.

        The arguments are those of `Engine`. Where a pair is too long, tokens of its longer text are
        left out.
        """
        self._engine = PairEngine(
            path,
            device=device,
            on_truncate=on_truncate,
            workers=workers,
            threads=threads,
            max_batch_tokens=max_batch_tokens,
        )
        self.activation_fn: Activation = self.manifest.activation
        self.model_card_data = self._engine.model_card_data

    def predict(
        self,
        inputs: Iterable[Any] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
        apply_softmax: bool | None = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: str | None = None,
        pool: None = None,
        chunk_size: None = None,
        *,
        sentences: Iterable[Any] | None = None,
    ) -> Any:
        """Score one pair of texts or many, as `CrossEncoder.predict` does.

        Args:
            inputs: a pair of texts, or a list, array or other iterable of pairs (`sentences` is its
                old name).
            prompt_name: which of the model's `prompts` to put before the first text of each pair.
            prompt: the prompt itself; goes before `prompt_name` and the default prompt.
            batch_size: at most this many pairs in a batch. Batches are cut by tokens, so it is
                seldom needed.
            show_progress_bar: None shows one when this package's logger is at INFO or DEBUG.
            activation_fn: "identity", "sigmoid", or a function of a tensor (imports torch), instead
                of `self.activation_fn`.
            apply_softmax: let the scores of the labels sum to 1, where there are several.
            convert_to_numpy: False gives a list of tensors.
            convert_to_tensor: True gives one tensor (imports torch).
            device: None, or the reranker's own.
            pool: not supported, and not needed: one reranker uses all cores.
            chunk_size: as `pool`.
            sentences: old name of `inputs`.

        Returns:
            An array [pairs], or [pairs, labels] if there are several labels; for one pair, what it
                has for it.

        """
        if (inputs is None) == (sentences is None):
            raise TypeError("inputs given twice" if inputs is not None else "predict needs pairs of texts")
        pairs, single = as_pairs(inputs if inputs is not None else sentences)
        check_running(batch_size, device, self.device, pool, chunk_size)
        scores = self._scores(pairs, prompt_name, prompt, batch_size, show_progress_bar)
        result = _finish(scores, self.activation_fn if activation_fn is None else activation_fn, apply_softmax)
        result = result if pairs else np.empty(0, np.float32)
        if convert_to_tensor or not convert_to_numpy:
            result = to_torch(result, as_list=not convert_to_tensor)
        elif not pairs:
            return np.array([])  # of float64, as there
        return result[0] if single else result

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
        device: str | None = None,
        pool: None = None,
        chunk_size: None = None,
    ) -> list[dict[str, Any]]:
        """Sort `documents` by their score with `query`, the best first, as `CrossEncoder.rank` does.

        Gives `top_k` of them, or all, each as `{"corpus_id": index, "score": score}`, and with
        `return_documents` also the "text". Equal scores keep the order of the documents. The other
        arguments are those of `predict`.
        """
        if self.num_labels != 1:
            raise ValueError(f"rank needs a model with one label, this one has {self.num_labels}: use predict")
        if top_k is not None and top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {top_k}")
        pairs = _with_query(query, documents)
        scores = self.predict(
            pairs,
            prompt_name,
            prompt,
            batch_size,
            show_progress_bar,
            activation_fn,
            device=device,
            pool=pool,
            chunk_size=chunk_size,
        ).tolist()
        order = sorted(range(len(scores)), key=lambda index: scores[index], reverse=True)[:top_k]
        texts = [{"text": pairs[index][1]} if return_documents else {} for index in order]
        return [{"corpus_id": i, "score": scores[i], **text} for i, text in zip(order, texts, strict=True)]

    @property
    def num_labels(self) -> int:
        """Scores of each pair."""
        return self.manifest.dim

    @property
    def labels(self) -> tuple[str, ...]:
        """What the scores of a pair are for."""
        return self.manifest.labels

    @property
    def max_seq_length(self) -> int:
        """The most tokens of a pair that count, special ones included. May be lowered."""
        return self._engine.max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        least = self.tokenizer.num_special_tokens_to_add(True) + 2
        if value < least:
            raise ValueError(f"max_seq_length must be at least {least} for a pair of texts, got {value}")
        self._engine.max_seq_length = value

    @property
    def prompts(self) -> dict[str, str]:
        """The model's prompts, by name."""
        return self._engine.prompts

    @property
    def default_prompt_name(self) -> str | None:
        """Which of them goes before the first text of each pair if none is asked for."""
        return self._engine.default_prompt_name

    @property
    def tokenizer(self) -> Any:
        """The underlying `tokenizers.Tokenizer`."""
        return self._engine.tokenizer

    @property
    def manifest(self) -> Manifest:
        """What the artifact says of itself: model, labels, activation, parity certificate, versions."""
        return self._engine.manifest

    @property
    def device(self) -> str:
        """Where the model runs."""
        return self._engine.device

    @property
    def info(self) -> dict[str, Any]:
        """What runs: file, model, precision, backend, limits."""
        return self._engine.info

    @property
    def last_stats(self) -> EncodeStats:
        """What the last call did; its texts are pairs."""
        return self._engine.last_stats

    def close(self) -> None:
        """Stop the workers and free the model. A second call does nothing."""
        self._engine.close()

    def __enter__(self) -> Reranker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._engine)

    def _scores(
        self,
        pairs: list[Any],
        prompt_name: str | None,
        prompt: str | None,
        batch_size: int | None,
        show_progress_bar: bool | None,
    ) -> Scores:
        """What the model gives, [pairs, labels]."""
        engine = self._engine
        check_pairs(pairs)  # before any of them runs
        scores = np.empty((len(pairs), self.num_labels), np.float32)
        prefix = engine._resolve_prompt(prompt, prompt_name)
        with progress_bar(len(pairs), show_progress_bar) as progress:
            for window in engine._windows(map(tuple, pairs), prefix, batch_size, progress):
                scores[window.start : window.start + len(window.vectors)] = window.vectors
        return scores


def activate(scores: Scores, activation: Activation) -> Scores:
    """`scores` [pairs, labels] after an activation: its name, or a function of a tensor."""
    if activation == "identity":
        return scores
    if activation == "sigmoid":
        small: Scores = np.exp(-np.abs(scores))  # of the negative magnitude, which can't overflow
        above: Scores = np.where(scores >= 0, np.float32(1), small)
        return above / (1 + small)
    if not callable(activation):
        raise ValueError(f"activation_fn must be 'identity', 'sigmoid' or a function of a tensor, got {activation!r}")
    import torch

    return np.asarray(activation(torch.from_numpy(scores)), np.float32)


def softmax(scores: Scores) -> Scores:
    """`scores` [pairs, labels], those of each pair made to sum to 1."""
    exponents: Scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares: Scores = exponents / exponents.sum(axis=1, keepdims=True)
    return shares


def _finish(scores: Scores, activation: Activation, apply_softmax: bool | None) -> Scores:
    """[pairs, labels] -> the same, or [pairs] if there is one label."""
    scores = activate(scores, activation)
    if scores.ndim > 1 and scores.shape[1] == 1:
        return scores[:, 0]
    return softmax(scores) if apply_softmax and scores.ndim > 1 and len(scores) else scores


def _with_query(query: str, documents: Iterable[str]) -> list[Pair]:
    check_text(query, "the query")
    if isinstance(documents, str):
        raise TypeError("documents must be a list of texts, got one str")
    pairs = [(query, document) for document in documents]
    for index, (_, document) in enumerate(pairs):
        check_text(document, f"document {index}")
    return pairs
