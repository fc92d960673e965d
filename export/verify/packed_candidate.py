"""A plan's graph, which takes packed rows, as a candidate for parity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime

from sbert_infer.artifact.manifest import SENTENCE
from sbert_infer.backends.base import Batch
from sbert_infer.backends.tensorrt.tensors import packed_inputs
from sbert_infer.encode.pipeline import packed_batch
from sbert_infer.errors import EngineError
from sbert_infer.export.checkpoint.transformer import plain_tokenizer_json
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.verify.candidate import Ids, Vectors
from sbert_infer.export.verify.probe_texts import SENTENCES
from sbert_infer.similarity import cosine
from sbert_infer.text.packing import PackedRows, pack_rows
from sbert_infer.text.shapes import row_length
from sbert_infer.text.tokenizer import Tokenizer
from sbert_infer.types import Shape

_ROWS = (1, 3)  # that run at once
# Alone and among others, a text has the same vector but for rounding, which is coarser in BF16.
MIN_SAME = {"fp16": 0.9999, "bf16": 0.999}


class PackedCandidate:
    """A graph for packed rows in a session of onnxruntime on the CPU.

    Texts that run together share rows, or each has a row to itself if they are not to be `packed`.
    """

    def __init__(self, session: Any, reference: Reference, *, packed: bool) -> None:
        self._session, self._reference, self._packed = session, reference, packed
        self._inputs = [value.name for value in session.get_inputs()]
        tokenizer, limit = reference.tokenizer, reference.checkpoint.max_length
        self._tokenizer = Tokenizer(plain_tokenizer_json(tokenizer), limit, tokenizer.truncation_side)

    def encode(self, texts: Sequence[str], prompt: str = "") -> Vectors:
        """Encode `texts` together; one text is alone in its row."""
        pooling, pad_id = self._reference.checkpoint.pooling, self._reference.tokenizer.pad_token_id
        skip = 0 if pooling.include_prompt else self._tokenizer.prompt_length(prompt)
        tokenized = self._tokenizer([prompt + text for text in texts])
        vectors = np.empty((len(texts), self._reference.checkpoint.dim), np.float32)
        for rows in self._pack(tokenized.lengths):
            vectors[rows.texts] = self._run(packed_batch(tokenized, rows, pad_id, skip))
        if not np.isfinite(vectors).all():
            raise EngineError("the graph gives NaN or infinity")
        return vectors

    def run_together(self, texts: Sequence[str]) -> Vectors:
        """Encode `texts` together."""
        return self.encode(texts)

    def _pack(self, lengths: Ids) -> list[PackedRows]:
        """Rows that fit the texts, up to a plan's longest: a session takes any shape."""
        limit, length, segments = self._reference.checkpoint.max_length, max(1, int(lengths.max())), 1
        if self._packed:
            length, segments = max(length, min(limit, int(lengths.sum()))), len(lengths)
        shapes = [Shape(rows, row_length(length), segments) for rows in _ROWS]
        return pack_rows(lengths, shapes, hidden=limit)

    def _run(self, batch: Batch) -> Vectors:
        assert batch.packing is not None  # noqa: S101  # as `packed_batch` makes it
        every = packed_inputs(batch)
        try:
            output: Vectors = self._session.run([SENTENCE], {name: every[name] for name in self._inputs})[0]
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise EngineError(f"onnxruntime {onnxruntime.__version__} can't run the graph: {error}") from error
        return output.reshape(-1, output.shape[2])[batch.packing.texts]  # from [rows, segments, dim]


def cosine_among_others(session: Any, reference: Reference) -> float:
    """The lowest cosine of a text's vector alone to its vector among others in its row.

    It is below `MIN_SAME` if a layer other than attention mixes tokens, if attention does not heed
    the segments, or if positions can't be given; code of a checkpoint's own may do any of that.
    """
    texts = ["a", "?", *SENTENCES[:6]]
    alone = PackedCandidate(session, reference, packed=False).encode(texts)
    together = PackedCandidate(session, reference, packed=True).encode(texts)
    return float(cosine(alone, together).min())
