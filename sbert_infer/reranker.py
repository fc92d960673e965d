"""`Reranker` scores pairs of texts with an exported model, with the interface of `CrossEncoder`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import RERANKER, Manifest
from sbert_infer.base_engine import BaseEngine
from sbert_infer.encode.dense import DenseOutput
from sbert_infer.encode.options import EncodeOptions, Pool, check_running, given
from sbert_infer.encode.results import progress_bar, to_torch
from sbert_infer.errors import warn
from sbert_infer.text.inputs import as_pairs, check_pairs, check_text
from sbert_infer.types import Pair

Scores = npt.NDArray[np.float32]
Activation = str | Callable[[Any], Any]


class Reranker(BaseEngine):
    """Scores pairs of texts with an exported cross-encoder.

    >>> reranker = Reranker("reranker.onnx")  # doctest: +SKIP
    >>> reranker.rank("Who sat?", ["Rain fell all day.", "A cat sat."], top_k=1)  # doctest: +SKIP
    [{'corpus_id': 1, 'score': 0.98}]

    A score does not depend on which other pairs are scored with it. One reranker may be used from
    many threads.
    """

    kinds = (RERANKER,)
    settings = (*BaseEngine.settings, "activation_fn", "max_length")

    _activation_fn: Activation | None
    _output: DenseOutput

    def _apply(self, manifest: Manifest) -> None:
        self.activation_fn = manifest.activation
        self._output = DenseOutput(manifest)

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
        pool: Pool | None = None,
        chunk_size: int | None = None,
        *,
        sentences: Iterable[Any] | None = None,
        activation_fct: Activation | None = None,
        num_workers: int | None = None,
    ) -> Any:
        """Score one pair of texts or many, as `CrossEncoder.predict` does.

        Args:
            inputs: a pair of texts, or a list, array or other iterable of pairs (`sentences` is its
                old name).
            prompt_name: which of the model's `prompts` to put before the first text of each pair.
            prompt: the prompt itself; takes precedence over `prompt_name` and the default prompt.
            batch_size: the most pairs in a batch. Seldom needed, since batches are limited by
                tokens.
            show_progress_bar: None shows one when this package's logger is at INFO or DEBUG.
            activation_fn: "identity", "sigmoid", or a function of a tensor (imports torch, except
                for `torch.nn.Identity()` and `Sigmoid()`), instead of `self.activation_fn`.
            apply_softmax: make the scores of a pair's labels sum to 1, if there are several.
            convert_to_numpy: False gives a list of tensors.
            convert_to_tensor: True gives one tensor (imports torch).
            device: None, or the device that the reranker already uses.
            pool: what `start_multi_process_pool` returned. Makes no difference: one reranker uses
                all cores.
            chunk_size: as little needed as `pool`.
            sentences: old name of `inputs`.
            activation_fct: old name of `activation_fn`.
            num_workers: without effect, as in `CrossEncoder`.

        Returns:
            An array [pairs], or [pairs, labels] if there are several labels; for one pair, its
            single row.

        """
        pairs, single = as_pairs(given(inputs, sentences, "predict needs pairs of texts"))
        check_running(device, self.device, pool, chunk_size)
        options = EncodeOptions(self.resolve_prompt(prompt, prompt_name), batch_size, show_progress_bar)
        check_pairs(pairs)  # before any of them runs
        chosen = activation_fct if activation_fn is None else activation_fn
        activation = self.activation_fn if chosen is None else check_activation(chosen)
        with progress_bar(len(pairs), options.show_progress_bar) as progress:
            windows = self._run(map(tuple, pairs), self._output, options, progress)
            scores = self._output.fill(np.empty((len(pairs), self.num_labels), np.float32), windows)
        result = _finish(scores, activation, apply_softmax)
        result = result if pairs else np.empty(0, np.float32)
        if convert_to_tensor or not convert_to_numpy:
            result = to_torch(result, as_list=not convert_to_tensor)
        elif not pairs:
            return np.array([])  # float64, as CrossEncoder returns
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
        pool: Pool | None = None,
        chunk_size: int | None = None,
        *,
        activation_fct: Activation | None = None,
        num_workers: int | None = None,
        convert_to_numpy: bool | None = None,
        convert_to_tensor: bool | None = None,
        apply_softmax: bool | None = None,
    ) -> list[dict[str, Any]]:
        """Sort `documents` by their score with `query`, best first, as `CrossEncoder.rank` does.

        Returns the best `top_k`, or all, each as `{"corpus_id": index, "score": score}`, with its
        "text" if `return_documents`. Documents with equal scores keep their order. Scores are
        numbers of Python and there is one label, so `convert_to_numpy`, `convert_to_tensor` and
        `apply_softmax` only warn, as in `CrossEncoder`. The other arguments are those of `predict`.
        """
        if convert_to_numpy or convert_to_tensor or apply_softmax:
            warn("rank: convert_to_numpy, convert_to_tensor and apply_softmax have no effect: scores are of type float")
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
            activation_fct=activation_fct,
            num_workers=num_workers,
        ).tolist()
        order = sorted(range(len(scores)), key=lambda index: scores[index], reverse=True)[:top_k]
        texts = [{"text": pairs[index][1]} if return_documents else {} for index in order]
        return [{"corpus_id": i, "score": scores[i], **text} for i, text in zip(order, texts, strict=True)]

    @property
    def activation_fn(self) -> Activation | None:
        """What is applied to scores unless `predict` is given another; None for nothing."""
        return self._activation_fn

    @activation_fn.setter
    def activation_fn(self, value: Activation | None) -> None:
        self._activation_fn = None if value is None else check_activation(value)

    @property
    def default_activation_function(self) -> Activation | None:
        """The old name of `activation_fn`."""
        return self.activation_fn

    @property
    def max_length(self) -> int:
        """The old name of `max_seq_length`."""
        return self.max_seq_length

    @max_length.setter
    def max_length(self, value: int) -> None:
        self.max_seq_length = value

    @property
    def num_labels(self) -> int:
        """The number of scores of each pair."""
        return self.manifest.dim

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of a pair's scores."""
        return self.manifest.labels

    def _check_max_seq_length(self, value: int) -> None:
        least = self.pipeline.tokenizer.backend.num_special_tokens_to_add(True) + 2
        if value < least:
            raise ValueError(f"max_seq_length must be at least {least} for a pair of texts, got {value}")
        super()._check_max_seq_length(value)


def check_activation(activation: Activation) -> Activation:
    """Return `activation`; raise unless it is a known name or a function of a tensor."""
    if activation in ("identity", "sigmoid") or (callable(activation) and not isinstance(activation, type)):
        return activation
    raise ValueError(f"activation_fn must be 'identity', 'sigmoid' or a function of a tensor, got {activation!r}")


def activate(scores: Scores, activation: Activation | None) -> Scores:
    """Apply an activation, a name or a function of a tensor, to `scores` [pairs, labels]."""
    kind = type(activation)
    if kind.__module__ == "torch.nn.modules.linear" and kind.__name__ == "Identity":
        activation = "identity"
    if kind.__module__ == "torch.nn.modules.activation" and kind.__name__ == "Sigmoid":
        activation = "sigmoid"
    if activation is None or activation == "identity":
        return scores
    if isinstance(activation, str):
        small: Scores = np.exp(-np.abs(scores))  # the exponent is never positive, so this can't overflow
        above: Scores = np.where(scores >= 0, np.float32(1), small)
        return above / (1 + small)
    import torch

    with torch.inference_mode():
        return np.asarray(activation(torch.from_numpy(scores)), np.float32)


def softmax(scores: Scores) -> Scores:
    """Return `scores` [pairs, labels] after a softmax over the labels of each pair."""
    exponents: Scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares: Scores = exponents / exponents.sum(axis=1, keepdims=True)
    return shares


def _finish(scores: Scores, activation: Activation | None, apply_softmax: bool | None) -> Scores:
    """Apply activation and softmax: [pairs, labels] -> the same, or [pairs] for one label."""
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
