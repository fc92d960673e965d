"""`Engine`: opens an artifact and encodes texts, with the interface of `SentenceTransformer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import ENCODER, MULTI_VECTOR, SPARSE_ENCODER, TOKENS
from sbert_infer.base_engine import OpenModel
from sbert_infer.encode.hybrid import AllVectors, check_has_all, encode_all
from sbert_infer.encode.late_chunking import Spans, check_can_pool, encode_spans
from sbert_infer.encode.multi_vector import check_multi_vector, encode_multi_vector, is_multi_vector
from sbert_infer.encode.pipeline import Window
from sbert_infer.encode.precision import reduce_precision
from sbert_infer.encode.results import (
    Asked,
    check_asked,
    check_filled,
    check_out,
    check_running,
    convert_each,
    finish,
    given,
    place,
    progress_bar,
    to_torch,
)
from sbert_infer.encode.sparse import check_sparse, decode, encode_sparse, is_sparse, sparse_windows
from sbert_infer.encode.tokens import check_has_tokens, token_vectors
from sbert_infer.errors import warn
from sbert_infer.integrations.mteb import encode_task, model_meta
from sbert_infer.similarity import (
    MULTI_SIMILARITIES,
    SIMILARITIES,
    as_csr,
    pairwise_similarity,
    similarity,
    sparse_pairwise_similarity,
    sparse_similarity,
)
from sbert_infer.text.inputs import as_list, as_texts, check_texts

__all__ = ["Engine"]


class Engine(OpenModel):
    """Encodes texts with an exported model.

    >>> engine = Engine("model.onnx")                                  # doctest: +SKIP
    >>> engine.encode(["A cat sat.", "A feline was sitting."]).shape   # doctest: +SKIP
    (2, 384)

    A vector does not depend on which other texts are encoded with it. One engine may be used from
    many threads.
    """

    _kinds: tuple[str, ...] = (ENCODER, SPARSE_ENCODER, MULTI_VECTOR)
    _name = "Engine"

    def encode(
        self,
        inputs: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        output_value: str = "sentence_embedding",
        precision: str | None = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: str | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: None = None,
        chunk_size: None = None,
        *,
        sentences: str | Iterable[str] | None = None,
        out: npt.NDArray[np.float32] | None = None,
        max_active_dims: int | None = None,
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
            prompt: the prompt itself; goes before `prompt_name` and the default prompt.
            batch_size: at most this many texts in a batch. Batches are cut by tokens, so it is
                seldom needed.
            show_progress_bar: None shows one when this package's logger is at INFO or DEBUG.
            output_value: "sentence_embedding", or "token_embeddings" if the artifact was exported
                with those: a list of arrays [tokens, hidden], special tokens included.
            precision: "float32" (as None), "int8", "uint8", "binary" or "ubinary".
            convert_to_numpy: False gives a list of tensors.
            convert_to_tensor: True gives one tensor (imports torch).
            device: None, or the engine's own.
            normalize_embeddings: scale each vector to length 1.
            truncate_dim: keep this many leading dimensions.
            pool: not supported, and not needed: one engine uses all cores.
            chunk_size: as `pool`.
            sentences: old name of `inputs`.
            out: an array or memmap [texts, dim] to write to and return. `inputs` are then read as
                they are needed, so that memory stays flat however many there are.
            max_active_dims: for a sparse encoder: keep this many numbers of each vector, the
                largest.
            task: "query" or "document", as `encode_query` and `encode_document` set it. Only a
                multi-vector encoder tells them apart by more than their prompts.
            task_metadata: from the package mteb, whose `inputs` are a data loader.
            prompt_type: as `task_metadata`: whether these are queries or documents.
            hf_split: as `task_metadata`; changes nothing.
            hf_subset: as `task_metadata`; changes nothing.

        Returns:
            An array [texts, dim], or [dim] for one text. Of a sparse encoder a
                `scipy.sparse.csr_matrix` [texts, dim],
            of one row for one text; as tensors, what `SparseEncoder.encode` gives. Of a
                multi-vector encoder a list of
            arrays [tokens, dim], or one of those for one text.

        """
        if task_metadata is not None:
            mine = {"batch_size": batch_size, "show_progress_bar": show_progress_bar, "precision": precision}
            more = {"convert_to_tensor": convert_to_tensor, "normalize_embeddings": normalize_embeddings}
            return encode_task(self, inputs, task_metadata, prompt_type, **mine, **more, truncate_dim=truncate_dim)
        texts, single = as_texts(given(inputs, sentences))
        check_running(batch_size, device, self.device, pool, chunk_size)
        asked = Asked(
            prompt=self._resolve_prompt(prompt, prompt_name),
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
            task=task,
        )
        check_asked(asked)
        if is_sparse(self.manifest):
            check_sparse(self, asked)
            return encode_sparse(self, texts, asked).convert(single, asked)
        asked.refuse("max_active_dims", f"not for {self.manifest.name}, whose vectors are dense")
        if is_multi_vector(self.manifest):
            return convert_each(encode_multi_vector(self, texts, asked), single, asked)
        if output_value == TOKENS:
            asked.refuse("precision normalize_embeddings truncate_dim out", f"not with output_value={TOKENS!r}")
            return convert_each(self.token_vectors(texts, asked.prompt), single, asked)
        return self._encode_dense(texts, single, asked)

    def _encode_dense(self, texts: Iterable[str], single: bool, asked: Asked) -> Any:
        """The one path: windows of texts, their rows at their place, precision, array."""
        dim = self._resolve_dim(asked.truncate_dim)
        if asked.out is None:
            texts = known = list(texts)
            vectors = np.empty((len(known), dim), np.float32)
        else:
            vectors = check_out(asked.out, dim, asked)
        with progress_bar(len(vectors), asked.show_progress_bar) as progress:
            for window in self._windows(texts, asked.prompt, asked.batch_size, progress):
                place(vectors, window.start, finish(window.vectors, dim, asked.normalize_embeddings))
        if asked.out is not None:
            return check_filled(asked.out, self.last_stats.texts)
        result = reduce_precision(vectors, asked.precision) if len(vectors) else np.empty(0, np.float32)
        if not asked.as_arrays:
            result = to_torch(result, as_list=not asked.convert_to_tensor)
        return result[0] if single else result

    def token_vectors(self, texts: Iterable[str], prompt: str = "") -> list[npt.NDArray[np.float32]]:
        """What `encode(..., output_value="token_embeddings")` gives, with this very prompt."""
        check_has_tokens(self.manifest)
        known = as_list(texts, "token_vectors")
        found = token_vectors(self._open(), known, prompt, allow_truncation=self.on_truncate != "error")
        if found.truncated and self.on_truncate == "warn":
            warn(f"{found.truncated} of {len(known)} texts were cut to {self.max_seq_length} tokens")
        return found.vectors

    def encode_all(self, texts: Iterable[str], prompt_name: str | None = None, prompt: str | None = None) -> AllVectors:
        """Dense, sparse and multi-vector output of one pass, if the artifact has them (bge-m3).

        Needs an artifact that was made with `sbert-export --outputs sentence,sparse,multi`.
        """
        check_has_all(self.manifest)
        known = as_list(texts, "encode_all")
        prompt, allow = self._resolve_prompt(prompt, prompt_name), self.on_truncate != "error"
        dim = self._resolve_dim(None)
        found, truncated = encode_all(self._open(), self.manifest, known, prompt, dim, allow_truncation=allow)
        if truncated and self.on_truncate == "warn":
            warn(f"{truncated} of {len(known)} texts were cut to {self.max_seq_length} tokens")
        return found

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
        """Late chunking: the vectors of spans of a document, pooled from one pass over all of it.

        Needs mean pooling, and an artifact with token vectors (`sbert-export --outputs
        sentence,tokens`).

        Args:
            documents: a text, or a list of texts.
            spans: of each document, the first character of each span and the one behind its last.
            prompt_name: as for `encode`.
            prompt: as for `encode`.
            normalize_embeddings: as for `encode`.
            truncate_dim: as for `encode`.

        Returns:
            An array [spans, dim], or a list of one for each document. A document over the model's
                limit runs in
            windows that overlap; nothing is cut off.

        """
        check_can_pool(self.manifest)
        texts, single = as_texts(documents)
        known: list[str] = list(texts)
        each: list[Any] = [spans] if single else list(spans)
        check_texts(known)
        if len(known) != len(each):
            raise ValueError(f"{len(known)} documents, but spans of {len(each)}")
        prompt, dim = self._resolve_prompt(prompt, prompt_name), self._resolve_dim(truncate_dim)
        found = encode_spans(self._open(), self.manifest, known, each, prompt)
        found = [finish(vectors, dim, normalize_embeddings) for vectors in found]
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
        """Encode a stream: one vector for each text, in order, in memory that does not grow with their number.

        Texts are read some thousands ahead, so that they can be sorted by length. The arguments are
        those of `encode`.
        """
        for window in self.encode_windows(
            texts,
            prompt_name,
            prompt,
            batch_size,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim,
        ):
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
        """As `encode_iter`, but some thousands of vectors at a time, with their statistics.

        `progress` is told how many more texts are done.
        """
        source, single = as_texts(texts)
        if single:
            raise TypeError("encode_iter needs an iterable of texts, got one str: use encode")
        prompt = self._resolve_prompt(prompt, prompt_name)
        if is_sparse(self.manifest):
            asked = Asked(prompt, batch_size, normalize_embeddings=normalize_embeddings, truncate_dim=truncate_dim)
            check_sparse(self, asked)
            for window in sparse_windows(self, source, asked, progress):
                yield replace(window, vectors=window.vectors.to_csr())
            return
        check_multi_vector(self.manifest, "encode_windows")
        dim = self._resolve_dim(truncate_dim)
        for window in self._windows(source, prompt, batch_size, progress):
            yield replace(window, vectors=finish(window.vectors, dim, normalize_embeddings))

    def encode_query(
        self, inputs: Any = None, prompt_name: str | None = None, prompt: str | None = None, **options: Any
    ) -> Any:
        """Encode search queries: `encode` with the prompt named "query", if the model has one."""
        return self.encode(inputs, prompt_name or self._first_prompt("query"), prompt, task="query", **options)

    def encode_document(
        self, inputs: Any = None, prompt_name: str | None = None, prompt: str | None = None, **options: Any
    ) -> Any:
        """Encode documents to be found: `encode` with the prompt named "document", "passage" or "corpus", if any."""
        name = prompt_name or self._first_prompt("document", "passage", "corpus")
        return self.encode(inputs, name, prompt, task="document", **options)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """All pairs' similarity, [n, m], by the model's own function: of dense tensors a tensor, else an array."""
        if is_sparse(self.manifest):
            return sparse_similarity(self.similarity_fn_name, as_csr(embeddings1), as_csr(embeddings2))
        return similarity(self.similarity_fn_name, embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """The similarity of each row of one to the same row of the other, [n]."""
        if is_sparse(self.manifest):
            return sparse_pairwise_similarity(self.similarity_fn_name, as_csr(embeddings1), as_csr(embeddings2))
        return pairwise_similarity(self.similarity_fn_name, embeddings1, embeddings2)

    def decode(self, embeddings: Any, top_k: int | None = None) -> list[list[tuple[str, float]]]:
        """The words that each sparse vector stands for, with their weights, the heaviest first, as `SparseEncoder`."""
        words = is_sparse(self.manifest) and self.manifest.pooling[0].startswith(("splade", "presence"))
        if not words:
            raise ValueError(f"the dimensions of {self.manifest.name} are no words of its vocabulary")
        return decode(as_csr(embeddings), self.tokenizer.id_to_token, top_k)

    @property
    def similarity_fn_name(self) -> str:
        """Of cosine, dot, euclidean and manhattan; of a multi-vector encoder maxsim or meanmaxsim."""
        return self._similarity_fn_name

    @similarity_fn_name.setter
    def similarity_fn_name(self, name: Any) -> None:
        name = getattr(name, "value", name)  # sentence-transformers' enumeration
        known = MULTI_SIMILARITIES if is_multi_vector(self.manifest) else SIMILARITIES
        if name not in known:
            raise ValueError(f"similarity_fn_name must be one of {', '.join(known)}, got {name!r}")
        self._similarity_fn_name = name

    @property
    def mteb_model_meta(self) -> Any:
        """The model's card for the package mteb, which makes an engine one of its models."""
        return model_meta(self)

    def get_embedding_dimension(self) -> int:
        """The length of the vectors that `encode` returns."""
        return self._resolve_dim(None)

    def get_sentence_embedding_dimension(self) -> int:
        """The old name of `get_embedding_dimension`."""
        return self.get_embedding_dimension()

    @contextmanager
    def truncate_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """Within this context, `encode` keeps `truncate_dim` dimensions."""
        before, self.truncate_dim = self.truncate_dim, truncate_dim
        try:
            yield
        finally:
            self.truncate_dim = before

    truncate_sentence_embeddings = truncate_embeddings

    def _first_prompt(self, *names: str) -> str | None:
        return next((name for name in names if name in self.prompts), None)
