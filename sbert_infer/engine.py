"""`Engine` opens an artifact and encodes texts, with the interface of `SentenceTransformer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import ENCODER, MULTI_VECTOR, SPARSE_ENCODER, TOKENS, Manifest
from sbert_infer.encode.dense import DenseOutput
from sbert_infer.encode.hybrid import AllVectors, HybridOutput
from sbert_infer.encode.late_chunking import Spans, check_can_pool, encode_spans
from sbert_infer.encode.mteb import encode_task, model_meta
from sbert_infer.encode.multi_vector import MultiVectorOutput, multi_vector_features
from sbert_infer.encode.options import EncodeOptions, Pool, check_running, given
from sbert_infer.encode.output import Output, Window
from sbert_infer.encode.results import progress_bar
from sbert_infer.encode.signatures import AFTER_POOL, AFTER_PROMPT, typed_as_encode
from sbert_infer.encode.sparse import SparseOutput
from sbert_infer.encode.tokens import TokensOutput, encode_features
from sbert_infer.routed_engine import RoutedEngine
from sbert_infer.similarity import (
    MULTI_SIMILARITIES,
    SIMILARITIES,
    multi_similarity,
    pairwise_similarity,
    similarity,
    sparse_similarity,
    unit_rows,
)
from sbert_infer.sparse_methods import SparseMethods
from sbert_infer.text.inputs import as_list, as_texts, check_texts
from sbert_infer.torch_methods import TorchMethods

_NO_TEXTS = "encode needs texts: a str or an iterable of str"


class Engine(SparseMethods, TorchMethods, RoutedEngine):
    """Encodes texts with an exported model.

    >>> engine = Engine("model.onnx")                                  # doctest: +SKIP
    >>> engine.encode(["A cat sat.", "A feline was sitting."]).shape   # doctest: +SKIP
    (2, 384)

    A vector does not depend on which other texts are encoded with it. One engine may be used from
    many threads.
    """

    kinds = (ENCODER, SPARSE_ENCODER, MULTI_VECTOR)
    settings = (*SparseMethods.settings, "truncate_dim", "similarity_fn_name", "max_active_dims")

    truncate_dim: int | None  # dimensions that `encode` keeps by default; None for all
    _similarity_fn_name: str

    def _apply(self, manifest: Manifest) -> None:
        super()._apply(manifest)
        self.truncate_dim = manifest.truncate_dim
        self._similarity_fn_name = manifest.similarity

    @typed_as_encode
    def encode(
        self,
        inputs: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        output_value: str | None = "sentence_embedding",
        precision: str | None = "float32",
        convert_to_numpy: bool | None = None,
        convert_to_tensor: bool | None = None,
        device: Any = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: Pool | None = None,
        chunk_size: int | None = None,
        *,
        sentences: str | Iterable[str] | None = None,
        out: npt.NDArray[np.float32] | None = None,
        max_active_dims: int | None = None,
        convert_to_sparse_tensor: bool | None = None,
        save_to_cpu: bool | None = None,
        token_pooling: Any = None,
        task: str | None = None,
        task_metadata: Any = None,
        prompt_type: Any = None,
        hf_split: str | None = None,
        hf_subset: str | None = None,
    ) -> Any:
        """Encode one text or many, as `SentenceTransformer.encode` does.

        Args:
            inputs: a text, or a list, tuple, array or other iterable of texts (`sentences` is its
                old name).
            prompt_name: which of the model's `prompts` to put before each text.
            prompt: the prompt itself; takes precedence over `prompt_name` and the default prompt.
            batch_size: the most texts in a batch. Seldom needed, since batches are limited by
                tokens.
            show_progress_bar: None shows one when this package's logger is at INFO or DEBUG.
            output_value: "sentence_embedding", or "token_embeddings" if the artifact was exported
                with those: a list of arrays [tokens, hidden], special tokens included. None gives
                a dict of tensors for each text: token ids, mask and vectors (imports torch).
            precision: "float32" (also None), "int8", "uint8", "binary" or "ubinary".
            convert_to_numpy: True gives arrays, False a list of tensors. The default is arrays, but
                for a multi-vector encoder tensors.
            convert_to_tensor: True gives one tensor (imports torch).
            device: None, or the device that the engine already uses, or a list of it.
            normalize_embeddings: scale each vector to length 1.
            truncate_dim: keep this many leading dimensions.
            pool: what `start_multi_process_pool` returned. Makes no difference: one engine uses
                all cores.
            chunk_size: as little needed as `pool`.
            sentences: old name of `inputs`.
            out: an array or memmap [texts, dim] to write to and return. `inputs` are then read
                lazily, so memory use does not grow with the number of texts.
            max_active_dims: for a sparse encoder, keep this many of the largest values of each
                vector; by default `self.max_active_dims`.
            convert_to_sparse_tensor: for a sparse encoder, whether tensors are sparse. This,
                `save_to_cpu` or `convert_to_tensor` makes the result what `SparseEncoder` returns.
            save_to_cpu: for a sparse encoder; tensors are on the CPU in any case.
            token_pooling: for a multi-vector encoder, a token pooling of sentence-transformers.
            task: "query" or "document", as `encode_query` and `encode_document` set it. Only for
                a multi-vector encoder or a `Router` do the two differ in more than their prompts.
            task_metadata: set by the package mteb, which passes a data loader as `inputs`.
            prompt_type: set by mteb: whether the texts are queries or documents.
            hf_split: set by mteb; ignored.
            hf_subset: set by mteb; ignored.

        Returns:
            An array [texts, dim], or [dim] for one text.

            For a sparse encoder, a `scipy.sparse.csr_matrix` [texts, dim], which has one row for
            one text, or the tensors that `SparseEncoder.encode` returns. For a multi-vector
            encoder, a list of tensors [tokens, dim], or one such tensor for one text.

        """
        if task_metadata is not None:
            mine = {"batch_size": batch_size, "show_progress_bar": show_progress_bar, "precision": precision}
            more = {"convert_to_tensor": convert_to_tensor, "normalize_embeddings": normalize_embeddings}
            return encode_task(self, inputs, task_metadata, prompt_type, **mine, **more, truncate_dim=truncate_dim)
        texts, single = as_texts(given(inputs, sentences, _NO_TEXTS))
        check_running(device, self.device, pool, chunk_size)
        prompt = self.resolve_prompt(prompt, prompt_name)
        if output_value is None:
            features = multi_vector_features if self.manifest.kind == MULTI_VECTOR else encode_features
            how: dict[str, Any] = {"batch_size": batch_size, "show_progress_bar": show_progress_bar, "task": task}
            return features(self, texts, single, prompt, **how, truncate_dim=truncate_dim, token_pooling=token_pooling)
        options = EncodeOptions(
            prompt=prompt,
            batch_size=batch_size,
            show_progress_bar=show_progress_bar,
            output_value=output_value,
            precision=precision or "float32",
            convert_to_numpy=convert_to_numpy,
            convert_to_tensor=convert_to_tensor,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim,
            out=out,
            max_active_dims=max_active_dims,
            convert_to_sparse_tensor=convert_to_sparse_tensor,
            save_to_cpu=save_to_cpu,
            token_pooling=token_pooling,
            task=task,
        )
        engine = self.for_task(task)
        output = engine._output(options)
        if out is None:
            texts = known = list(texts)
        count = len(known) if out is None else len(out)
        with progress_bar(count, options.show_progress_bar) as progress:
            result = output.gather(engine._run(texts, output, options, progress), count, single, options)
        self.last_stats = engine.last_stats
        return result

    def token_vectors(self, texts: Iterable[str], prompt: str = "") -> list[npt.NDArray[np.float32]]:
        """Return the token vectors of each text, as `encode(output_value="token_embeddings")`."""
        output, known = TokensOutput(self.manifest), as_list(texts, "token_vectors")
        return [vectors for window in self._run(known, output, EncodeOptions(prompt)) for vectors in window.vectors]

    def encode_all(self, texts: Iterable[str], prompt_name: str | None = None, prompt: str | None = None) -> AllVectors:
        """Return the dense, sparse and multi-vector output of one pass over the texts (bge-m3).

        Needs an artifact made with `sbert-export --outputs sentence,sparse,multi`.
        """
        output = HybridOutput(self.manifest, self.resolve_dim(None), self.pipeline.tokenizer)
        known = as_list(texts, "encode_all")
        options = EncodeOptions(self.resolve_prompt(prompt, prompt_name))
        return output.gather(self._run(known, output, options), len(known), single=False, options=options)

    def encode_spans(
        self,
        documents: str | Sequence[str],
        spans: Spans | Sequence[Spans],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
    ) -> Any:
        """Encode spans of documents, each pooled from one pass over its document (late chunking).

        Needs mean pooling, and an artifact with token vectors (`sbert-export --outputs
        sentence,tokens`).

        Args:
            documents: a text, or a list of texts.
            spans: for each document, the character offsets (start, end) of its spans; the end is
                exclusive.
            prompt_name: as for `encode`.
            prompt: as for `encode`.
            normalize_embeddings: as for `encode`.
            truncate_dim: as for `encode`.

        Returns:
            An array [spans, dim], or a list with one such array for each document. A document
            over the model's limit runs in overlapping windows; nothing is cut off.

        """
        check_can_pool(self.manifest)
        texts, single = as_texts(documents)
        known: list[str] = list(texts)
        each: list[Any] = [spans] if single else list(spans)
        check_texts(known)
        if len(known) != len(each):
            raise ValueError(f"{len(known)} documents, but spans of {len(each)}")
        prompt, dim = self.resolve_prompt(prompt, prompt_name), self.resolve_dim(truncate_dim)
        found, self.last_stats = encode_spans(self.pipeline, self.manifest, known, each, prompt)
        found = [unit_rows(rows[:, :dim]) if normalize_embeddings else rows[:, :dim] for rows in found]
        return found[0] if single else found

    def encode_iter(
        self,
        texts: Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        *,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
    ) -> Iterator[npt.NDArray[np.float32]]:
        """Yield one vector for each text, in order, in memory that does not grow with their number.

        Texts are read a few thousand ahead, so that they can be sorted by length. The arguments are
        those of `encode`.
        """
        options: dict[str, Any] = {"normalize_embeddings": normalize_embeddings, "truncate_dim": truncate_dim}
        for window in self.encode_windows(texts, prompt_name, prompt, batch_size, **options):
            yield from window.vectors

    def encode_windows(
        self,
        texts: Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        *,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        progress: Callable[[int], object] = lambda count: None,
    ) -> Iterator[Window]:
        """Like `encode_iter`, but yield a few thousand vectors at a time, with their statistics.

        `progress` is called with the number of texts finished since its last call.
        """
        source, single = as_texts(texts)
        if single:
            raise TypeError("encode_iter needs an iterable of texts, got one str: use encode")
        if self.manifest.kind == MULTI_VECTOR:
            raise ValueError(f"encode_windows: not for {self.manifest.name}, which gives a vector for each token")
        options = EncodeOptions(
            self.resolve_prompt(prompt, prompt_name),
            batch_size,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim,
        )
        for window in self._run(source, self._output(options), options, progress):
            yield replace(window, vectors=window.vectors.to_csr()) if self.manifest.kind == SPARSE_ENCODER else window

    @typed_as_encode
    def encode_query(
        self, inputs: Any = None, prompt_name: str | None = None, prompt: str | None = None, *more: Any, **options: Any
    ) -> Any:
        """Encode search queries: `encode` with the prompt named "query", if the model has one."""
        return self._encode_for("query", inputs, prompt_name, prompt, more, options)

    @typed_as_encode
    def encode_document(
        self, inputs: Any = None, prompt_name: str | None = None, prompt: str | None = None, *more: Any, **options: Any
    ) -> Any:
        """Encode documents: `encode` with the prompt named "document", "passage" or "corpus"."""
        return self._encode_for("document", inputs, prompt_name, prompt, more, options)

    def _encode_for(
        self, task: str, inputs: Any, name: str | None, prompt: str | None, more: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        """Call `encode` as sentence-transformers does, which those who replace it rely on."""
        texts = given(inputs, options.pop("sentences", None), _NO_TEXTS)
        name = name or (self.prompt_name_for(task) if prompt is None else None)
        options = {"inputs": texts, "prompt_name": name, "prompt": prompt, "task": task, **options}
        if len(more) > len(AFTER_PROMPT):
            raise TypeError(f"encode_{task} takes at most {3 + len(AFTER_PROMPT)} positional arguments")
        return self.encode(**dict(zip(AFTER_PROMPT, more, strict=False)), **options)

    def similarity(self, embeddings1: Any, embeddings2: Any, **options: Any) -> Any:
        """Return the similarity of all pairs, [n, m], by the model's own function.

        The result is a tensor if tensors are given, otherwise an array that also has the methods of
        a tensor: a `TensorArray`. For a multi-vector encoder there are the options of
        `similarity.multi_similarity`.
        """
        if self.manifest.kind == MULTI_VECTOR:
            return multi_similarity(self.similarity_fn_name, embeddings1, embeddings2, **options)
        if self.manifest.kind == SPARSE_ENCODER:
            return sparse_similarity(self.similarity_fn_name, embeddings1, embeddings2, **options)
        return similarity(self.similarity_fn_name, embeddings1, embeddings2, **options)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any, **options: Any) -> Any:
        """Return the similarity of each row to the same row of the other argument, [n]."""
        if self.manifest.kind == MULTI_VECTOR:
            return multi_similarity(self.similarity_fn_name, embeddings1, embeddings2, pairwise=True, **options)
        if self.manifest.kind == SPARSE_ENCODER:
            return sparse_similarity(self.similarity_fn_name, embeddings1, embeddings2, pairwise=True, **options)
        return pairwise_similarity(self.similarity_fn_name, embeddings1, embeddings2, **options)

    @property
    def similarity_fn_name(self) -> str:
        """The name of the similarity function.

        One of cosine, dot, euclidean and manhattan; for a multi-vector encoder, maxsim or
        meanmaxsim.
        """
        return self._similarity_fn_name

    @similarity_fn_name.setter
    def similarity_fn_name(self, name: Any) -> None:
        name = getattr(name, "value", name)  # sentence-transformers' enumeration
        known = MULTI_SIMILARITIES if self.manifest.kind == MULTI_VECTOR else SIMILARITIES
        if name not in known:
            raise ValueError(f"similarity_fn_name must be one of {', '.join(known)}, got {name!r}")
        self._similarity_fn_name = name

    @property
    def mteb_model_meta(self) -> Any:
        """The model card for the package mteb; having one makes the engine a model of mteb's."""
        return model_meta(self)

    def get_embedding_dimension(self) -> int:
        """Return the length of the vectors that `encode` returns."""
        return self.resolve_dim(None)

    get_sentence_embedding_dimension = get_embedding_dimension  # its old name

    @contextmanager
    def truncate_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """Make `encode` keep `truncate_dim` dimensions within this context."""
        before, self.truncate_dim = self.truncate_dim, truncate_dim
        try:
            yield
        finally:
            self.truncate_dim = before

    truncate_sentence_embeddings = truncate_embeddings

    def encode_multi_process(self, sentences: Iterable[str], pool: Pool, *args: Any, **options: Any) -> Any:
        """Encode texts: the old name of `encode(pool=...)`, with its arguments in another order."""
        if len(args) > len(AFTER_POOL):
            raise TypeError(f"encode_multi_process takes at most {2 + len(AFTER_POOL)} positional arguments")
        return self.encode(sentences, pool=pool, **dict(zip(AFTER_POOL, args, strict=False)), **options)

    def _output(self, options: EncodeOptions) -> Output:
        """Return the kind of output that `options` ask for; refuse options it does not support."""
        manifest = self.manifest
        if manifest.kind == SPARSE_ENCODER:
            return SparseOutput.of(manifest, options, self.truncate_dim, self.max_active_dims)
        options.refuse("max_active_dims", f"not for {manifest.name}, whose vectors are dense")
        if manifest.kind == MULTI_VECTOR:
            return MultiVectorOutput(manifest, options, self.truncate_dim, self.pipeline.tokenizer)
        options.refuse(
            "convert_to_sparse_tensor save_to_cpu token_pooling", f"not for {manifest.name}, a dense encoder"
        )
        if options.output_value == TOKENS:
            options.refuse("precision normalize_embeddings truncate_dim out", f"not with output_value={TOKENS!r}")
            return TokensOutput(manifest)
        return DenseOutput.of(manifest, options, self.resolve_dim(options.truncate_dim))

    def resolve_dim(self, truncate_dim: int | None) -> int:
        """Return how many dimensions are kept, given the `truncate_dim` of a call."""
        wanted = truncate_dim if truncate_dim is not None else self.truncate_dim
        if wanted is not None and wanted < 1:
            raise ValueError(f"truncate_dim must be at least 1, got {wanted}")
        return self.manifest.dim if wanted is None else min(wanted, self.manifest.dim)

    def _check_max_seq_length(self, value: int) -> None:
        if self.manifest.kind == MULTI_VECTOR:
            raise ValueError(f"max_seq_length: not for {self.manifest.name}, which gives a vector for each token")
        super()._check_max_seq_length(value)
