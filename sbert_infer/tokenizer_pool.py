"""Tokenizing beside an event loop: in other threads, and in pieces, so that many callers can take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import numpy as np

from .call import CLOSED, within
from .errors import EngineError
from .pipeline import Pipeline
from .texts import Text, characters, prepend
from .tokenizer import TokenizedTexts

__all__ = ["TokenizerPool"]

Result = TypeVar("Result")

# Texts that are tokenized in one go: a caller with one text waits no longer than that for a caller with thousands.
_PIECE_TEXTS = 64
_THREADS = 2  # the tokenizer shares a piece among the cores by itself, and releases the GIL
# Characters that take some 0.2 ms to tokenize: handing them to a thread would cost as much.
_FEW_CHARACTERS = 1000
_PROMPTS = 64  # whose lengths are kept


class TokenizerPool:
    """Threads that run the tokenizer of a pipeline."""

    def __init__(self, pipeline: Pipeline, *, include_prompt: bool) -> None:
        self._pipeline, self._include_prompt = pipeline, include_prompt
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sbert-infer-tokenizer")
        self._prompt_length = lru_cache(maxsize=_PROMPTS)(pipeline.tokenizer.prompt_length)

    def is_little(self, texts: Sequence[Text], prompt: str) -> bool:
        """Whether these are so few that no thread of the pool is needed: `tokenize_little` is for any thread."""
        return sum(map(characters, texts)) + len(prompt) * len(texts) <= _FEW_CHARACTERS

    def tokenize_little(self, texts: Sequence[Text], prompt: str) -> tuple[TokenizedTexts, int]:
        """As `tokenize`, at once."""
        with _no_panic:
            return self._pipeline.tokenizer(prepend(prompt, texts) if prompt else texts), self._left_out(prompt)

    async def tokenize(self, texts: Sequence[Text], prompt: str, deadline: float) -> tuple[TokenizedTexts, int]:
        """The tokens of `texts`, with `prompt` before each, and how many of them pooling leaves out."""
        tokenizer = self._pipeline.tokenizer

        def tokenize(start: int) -> TokenizedTexts:
            piece = texts[start : start + _PIECE_TEXTS]
            with _no_panic:
                return tokenizer(prepend(prompt, piece) if prompt else piece)

        skip = await self._run(self._left_out, prompt, deadline) if prompt else 0
        pieces = [await self._run(tokenize, start, deadline) for start in range(0, len(texts), _PIECE_TEXTS)]
        return TokenizedTexts.joined((piece, np.arange(len(piece.lengths))) for piece in pieces), skip

    async def check(self, token_ids: Sequence[Sequence[int]], deadline: float) -> TokenizedTexts:
        """Texts that were tokenized elsewhere."""
        if sum(map(len, token_ids)) <= _FEW_CHARACTERS:
            return self._pipeline.tokenizer.tokenized(token_ids)
        return await self._run(self._pipeline.tokenizer.tokenized, token_ids, deadline)

    def close(self) -> None:
        """Take no more pieces, and wait for those that were."""
        self._threads.shutdown()

    def _left_out(self, prompt: str) -> int:
        return self._prompt_length(prompt) if prompt and not self._include_prompt else 0

    async def _run(self, function: Callable[..., Result], argument: object, deadline: float) -> Result:
        try:
            future = asyncio.get_running_loop().run_in_executor(self._threads, function, argument)
        except RuntimeError:  # the threads were shut down
            raise EngineError(CLOSED) from None
        return await within(future, deadline)


class _NoPanic:
    """A context in which a panic of the tokenizer's, which is no `Exception`, becomes one."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            raise EngineError(f"the tokenizer failed: {error}") from error


_no_panic = _NoPanic()
