"""Tokenizing beside an event loop: in other threads, and in pieces, so that many callers can take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import numpy as np

from sbert_infer.encode.pipeline import Pipeline
from sbert_infer.errors import EngineError
from sbert_infer.scheduling.call import CLOSED, within
from sbert_infer.text.inputs import characters, prepend
from sbert_infer.text.tokenizer import TokenizedTexts, Tokenizer
from sbert_infer.types import Text

__all__ = ["TokenizerPool"]

Argument = TypeVar("Argument")
Result = TypeVar("Result")

# Texts that are tokenized in one go: a caller with one text waits no longer than that for a caller
# with thousands.
_PIECE_TEXTS = 64
_THREADS = 2  # the tokenizer shares a piece among the cores by itself, and releases the GIL
# Characters that take some 0.2 ms to tokenize: handing them to a thread would cost as much.
_FEW_CHARACTERS = 1000
_TEXT_COST = 20  # what a text takes whatever its length, in characters
_PROMPTS = 64  # whose lengths are kept


class TokenizerPool:
    """Threads that run the tokenizer of a pipeline, or another one, which cuts long texts at their other side."""

    def __init__(self, pipeline: Pipeline, other_side: Callable[[int], Tokenizer], *, include_prompt: bool) -> None:
        self._pipeline, self._include_prompt = pipeline, include_prompt
        self._other_side = lru_cache(maxsize=1)(other_side)  # few ask for it
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sbert-infer-tokenizer")
        self._prompt_length = lru_cache(maxsize=_PROMPTS)(pipeline.tokenizer.prompt_length)

    def tokenizer(self, other_side: bool) -> Tokenizer:
        """The pipeline's own or the other one, which takes a moment the first time: for other threads."""
        own = self._pipeline.tokenizer
        return self._other_side(own.max_length) if other_side else own

    def is_little(self, texts: Sequence[Text], prompt: str) -> bool:
        """Whether these are so few that no thread of the pool is needed: `tokenize_little` is for any thread."""
        return sum(map(characters, texts)) + (_TEXT_COST + len(prompt)) * len(texts) <= _FEW_CHARACTERS

    def tokenize_little(self, texts: Sequence[Text], prompt: str) -> tuple[TokenizedTexts, int]:
        """As `tokenize`, at once."""
        return self._tokenize(texts, prompt), self._left_out(prompt)

    async def tokenize(
        self, texts: Sequence[Text], prompt: str, deadline: float, other_side: bool = False
    ) -> tuple[TokenizedTexts, int]:
        """The tokens of `texts`, with `prompt` before each, and how many of them pooling leaves out."""
        skip = await self._run(deadline, self._left_out, prompt) if prompt else 0
        pieces = [
            await self._run(deadline, self._tokenize, texts[start : start + _PIECE_TEXTS], prompt, other_side)
            for start in range(0, len(texts), _PIECE_TEXTS)
        ]
        return TokenizedTexts.joined((piece, np.arange(len(piece.lengths))) for piece in pieces), skip

    async def check(
        self, token_ids: Sequence[Sequence[int]], deadline: float, other_side: bool = False
    ) -> TokenizedTexts:
        """Texts that were tokenized elsewhere."""
        if sum(map(len, token_ids)) <= _FEW_CHARACTERS and not other_side:
            return self._pipeline.tokenizer.tokenized(token_ids)
        return await self._run(deadline, lambda: self.tokenizer(other_side).tokenized(token_ids))

    def close(self) -> None:
        """Take no more pieces, and wait for those that were."""
        self._threads.shutdown()

    def _tokenize(self, texts: Sequence[Text], prompt: str, other_side: bool = False) -> TokenizedTexts:
        return _without_panic(self.tokenizer(other_side), prepend(prompt, texts) if prompt else texts)

    def _left_out(self, prompt: str) -> int:
        return _without_panic(self._prompt_length, prompt) if prompt and not self._include_prompt else 0

    async def _run(self, deadline: float, function: Callable[..., Result], *arguments: object) -> Result:
        try:
            future = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        except RuntimeError:  # the threads were shut down
            raise EngineError(CLOSED) from None
        return await within(future, deadline)


def _without_panic(function: Callable[[Argument], Result], argument: Argument) -> Result:
    """A panic of the tokenizer's is no `Exception`, and would end a worker."""
    try:
        return function(argument)
    except Exception:
        raise
    except BaseException as error:
        raise EngineError(f"the tokenizer failed: {error}") from error
