"""A cache of sentence vectors: a text that was encoded before is not encoded again."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import Manifest
from sbert_infer.backends.base import Array
from sbert_infer.encode.dense import DenseOutput
from sbert_infer.encode.output import Collector, Indices
from sbert_infer.errors import TextError, TruncationError
from sbert_infer.scheduling.call import CallOptions
from sbert_infer.scheduling.stats import CallCounts
from sbert_infer.text.tokenizer import TokenizedTexts
from sbert_infer.types import Encoded, Text

# Of an entry besides its vector. Measured in caches of up to 700,000 entries, all of which had been
# replaced once: 258 to 315 bytes for the key and its place among the others.
_ENTRY_BYTES = 330
_KEY_BYTES = 16

Run = Callable[[list[Text], CallOptions, float], Awaitable[Encoded]]


class _Rows(NamedTuple):
    """Whole vectors in float32, before dimensions are cut or lengths changed, one for each text."""

    vectors: Array
    tokens: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.bool_]

    def take(self, rows: Indices) -> _Rows:
        """Return a copy of some rows."""
        return _Rows(self.vectors[rows], self.tokens[rows], self.truncated[rows])

    def put(self, rows: Indices, new: _Rows) -> None:
        """Replace some rows; of several for the same place, the last one stays."""
        self.vectors[rows], self.tokens[rows], self.truncated[rows] = new


class VectorCache:
    """The vectors of one model, the least recently used of which make room for new ones.

    It holds no texts: a text is known by a hash of 16 bytes, with a secret of this process, so that
    nobody can find two texts with the same hash. All calls must come from one event loop.
    """

    def __init__(self, megabytes: float, manifest: Manifest) -> None:
        """Make an empty cache that never takes more than `megabytes`, of 2**20 bytes each."""
        self._entry_bytes = manifest.dim * 4 + _ENTRY_BYTES
        capacity = int(megabytes * 2**20 // self._entry_bytes)
        if capacity < 1:
            raise ValueError(f"cache_mb must have room for one vector ({self._entry_bytes} bytes), got {megabytes}")
        # The system gives memory to these as rows are written.
        self._rows = _Rows(
            np.empty((capacity, manifest.dim), np.float32), np.empty(capacity, np.int64), np.empty(capacity, np.bool_)
        )
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # the row of each key, least recently used first
        self._secret = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)
        self._output = _RowsOutput(manifest)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def size(self) -> int:
        """The bytes that its entries take."""
        return len(self._slots) * self._entry_bytes

    async def encode(
        self, run: Run, counts: CallCounts, limit: int, texts: list[Text], options: CallOptions, arrival: float
    ) -> Encoded:
        """Return what `run(texts, options, arrival)` would, and run only texts that are not here.

        The vectors of the others have the bits that they had when they were run. `limit` is where
        texts are cut now, in tokens.
        """
        output = options.output
        if not isinstance(output, DenseOutput):
            return await run(texts, options, arrival)
        keys = self._keys(texts, options, limit)
        missing, rows = self._find(keys, whole_texts_only=options.on_truncate == "error")
        counts.totals["cache_hits"] += len(texts) - len(missing)
        counts.totals["cache_misses"] += len(missing)
        if len(missing):
            try:
                new = await run([texts[i] for i in missing], options._replace(output=self._output), arrival)
            except (TextError, TruncationError):  # names the text by its place in the whole call
                if len(missing) == len(texts):
                    raise
                return await run(texts, options, arrival)
            rows.put(missing, new.vectors)
            self._put([keys[i] for i in missing], new.vectors)
        return Encoded(output.finish(rows.vectors), int(rows.tokens.sum()), int(np.count_nonzero(rows.truncated)))

    def _keys(self, texts: Iterable[Text], options: CallOptions, limit: int) -> list[bytes]:
        """Hash each text with all that its vector depends on."""
        prompt = options.prompt.encode("utf-8", "surrogatepass")
        start = hashlib.blake2b(digest_size=_KEY_BYTES, key=self._secret)
        start.update(b"%d %d %d %s" % (limit, options.other_side, len(prompt), prompt))
        keys = []
        for text in texts:
            hash = start.copy()
            hash.update(str(text).encode("utf-8", "surrogatepass"))
            keys.append(hash.digest())
        return keys

    def _find(self, keys: Sequence[bytes], *, whole_texts_only: bool) -> tuple[Indices, _Rows]:
        """Return which texts are missing, and copies of the rows of the others, in their places."""
        slots = np.fromiter((self._slots.get(key, -1) for key in keys), np.int64, len(keys))
        rows = self._rows.take(slots)
        known = slots >= 0
        if whole_texts_only:  # the queue has to refuse the others
            known &= ~rows.truncated
        for index in np.flatnonzero(known).tolist():
            self._slots.move_to_end(keys[index])
        return np.flatnonzero(~known), rows

    def _put(self, keys: Sequence[bytes], rows: _Rows) -> None:
        """Keep these rows. One that is known already stays as it is."""
        new, slots = [], []
        for index, key in enumerate(keys):
            if key in self._slots:
                continue
            full = len(self._slots) == len(self._rows.tokens)
            slot = self._slots.popitem(last=False)[1] if full else len(self._slots)
            self._slots[key] = slot
            new.append(index)
            slots.append(slot)
        self._rows.put(np.array(slots, np.int64), rows.take(np.array(new, np.int64)))


class _RowsOutput(DenseOutput):
    """Whole vectors with the number of tokens of each text, and whether it was cut: `_Rows`."""

    def collect(self, tokenized: TokenizedTexts) -> Collector:
        return _RowsCollector(super().collect(tokenized), tokenized)


class _RowsCollector(Collector):
    def __init__(self, vectors: Collector, tokenized: TokenizedTexts) -> None:
        self._vectors, self._tokenized = vectors, tokenized

    def put(self, rows: Indices, found: Sequence[Array]) -> Indices:
        return self._vectors.put(rows, found)

    def result(self, order: Indices | None) -> _Rows:
        texts = self._tokenized
        order = np.arange(len(texts.lengths)) if order is None else order
        return _Rows(self._vectors.result(order), texts.lengths[order], texts.truncated[order])
