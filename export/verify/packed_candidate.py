"""A plan's graph, which takes packed rows, as a candidate for parity."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime

from sbert_infer.artifact.manifest import SENTENCE
from sbert_infer.backends.base import Batch, Packing
from sbert_infer.errors import EngineError
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.verify.candidate import Ids, Vectors


class PackedCandidate:
    """A graph for packed rows in a session of onnxruntime on the CPU.

    Texts that run together share rows as long as the model's limit, or each has a row to itself if
    the model can't be packed. `reference` tokenizes.
    """

    def __init__(self, session: Any, reference: Reference, *, packed: bool) -> None:
        self._session, self._reference, self._packed = session, reference, packed
        self._inputs = {value.name for value in session.get_inputs()}
        self._tokenizing = threading.Lock()  # the tokenizer must not be used by two threads at once

    def encode(self, texts: Sequence[str], prompt: str = "") -> Vectors:
        """Encode `texts` in one batch; one text is alone in its row."""
        with self._tokenizing:
            ids, mask = self._reference.tokenize([prompt + text for text in texts])
            prompt_length = self._reference.prompt_length(prompt)
        if self._reference.checkpoint.pooling.include_prompt:
            prompt_length = 0
        tokens = [row[kept > 0].numpy() for row, kept in zip(ids, mask, strict=True)]
        limit = self._reference.checkpoint.max_length
        batch = pack(tokens, limit if self._packed else 1, self._reference.tokenizer.pad_token_id, prompt_length)
        vectors = self._run(batch)
        if not np.isfinite(vectors).all():
            raise EngineError("the graph gives NaN or infinity")
        return vectors

    def run_together(self, texts: Sequence[str]) -> Vectors:
        """Encode `texts` in one batch."""
        return self.encode(texts)

    def _run(self, batch: Batch) -> Vectors:
        inputs = packed_inputs(batch)
        try:
            given = {name: inputs[name] for name in self._inputs}
            output: Vectors = self._session.run([SENTENCE], given)[0]  # [rows, segments, dim]
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise EngineError(f"onnxruntime {onnxruntime.__version__} can't run the graph: {error}") from error
        assert batch.packing is not None  # noqa: S101  # `pack` made it
        return output.reshape(-1, output.shape[2])[batch.packing.texts]


def packed_inputs(batch: Batch) -> dict[str, Ids]:
    """The inputs of a plan's graph, by name."""
    packing = batch.packing
    assert packing is not None  # noqa: S101
    return {
        "input_ids": batch.ids,
        "segment_ids": packing.segments,
        "position_ids": packing.positions,
        "starts": packing.starts,
        "ends": packing.ends,
    }


def pack(texts: Sequence[Ids], limit: int, pad_id: int, prompt_length: int = 0) -> Batch:
    """Put texts, longest first, each into the first row that has room for it.

    Rows have at most `limit` tokens, or those of the longest text if it is longer.
    """
    length = max(1, *(len(text) for text in texts), min(limit, sum(len(text) for text in texts)))
    rows: list[list[int]] = []
    free: list[int] = []
    for text in sorted(range(len(texts)), key=lambda text: -len(texts[text])):
        row = next((row for row, room in enumerate(free) if room >= max(1, len(texts[text]))), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(length)
        rows[row].append(text)
        free[row] -= max(1, len(texts[text]))
    segments = max(len(row) for row in rows)
    ids = np.full((len(rows), length), pad_id, np.int64)
    segment_ids, positions = np.zeros_like(ids), np.zeros_like(ids)
    starts, ends = np.zeros((2, len(rows), segments), np.int64)
    places = np.zeros(len(texts), np.int64)
    for row, members in enumerate(rows):
        end = 0
        for number, text in enumerate(members):
            start, end = end, end + len(texts[text])
            ids[row, start:end], segment_ids[row, start:end] = texts[text], number + 1
            positions[row, start:end] = np.arange(end - start)
            starts[row, number], ends[row, number] = min(start + prompt_length, end), end
            places[text] = row * segments + number
    packing = Packing(segment_ids, positions, starts, ends, places)
    return Batch(ids, (segment_ids > 0).astype(np.int64), packing=packing)
