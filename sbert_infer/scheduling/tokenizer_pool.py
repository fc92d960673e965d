"""Tokenizing outside the event loop: in threads, and in pieces, so that callers take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import numpy as np

from sbert_infer.backends.base import CLOSED
from sbert_infer.encode.pipeline import Pipeline
from sbert_infer.errors import EngineError
from sbert_infer.scheduling.call import CallOptions, within
from sbert_infer.text.batching import cut_in_order
from sbert_infer.text.inputs import characters, prepend
from sbert_infer.text.tokenizer import TokenizedTexts, Tokenizer
from sbert_infer.types import BULK, INTERACTIVE, Text

Argument = TypeVar("Argument")
Result = TypeVar("Result")

# Texts that are tokenized in one piece, and their characters, if there are several: of each other
# caller of its lane, a caller with one text waits for no more than a piece.
_PIECE_TEXTS, _PIECE_CHARACTERS = 64, 2**16
# Characters that take about 0.2 ms to tokenize. Handing them to a thread would cost as much.
_FEW_CHARACTERS = 1000
_TEXT_COST = 20  # fixed cost of a text, in characters
_PROMPTS = 64  # number of prompts whose lengths are cached


class TokenizerPool:
    """Threads that run a pipeline's tokenizer, or one that cuts long texts at the opposite end."""

    def __init__(self, pipeline: Pipeline, other_side: Callable[[int], Tokenizer], *, include_prompt: bool) -> None:
        self._pipeline, self._include_prompt = pipeline, include_prompt
        self._other_side = lru_cache(maxsize=1)(other_side)  # loaded when first needed, which is rare
        # One for each lane: the tokenizer itself spreads a piece over the cores, and releases the
        # GIL. A text keeps one core, so bulk leaves the others to interactive texts.
        self._threads = {
            lane: ThreadPoolExecutor(1, thread_name_prefix=f"sbert-infer-tokenizer-{lane}")
            for lane in (INTERACTIVE, BULK)
        }
        self._prompt_length = lru_cache(maxsize=_PROMPTS)(pipeline.tokenizer.prompt_length)

    def tokenizer(self, other_side: bool) -> Tokenizer:
        """Return the pipeline's tokenizer, or the one that cuts at the opposite end.

        Loading the latter takes a moment the first time, so do not call this in the event loop.
        """
        own = self._pipeline.tokenizer
        return self._other_side(own.max_length) if other_side else own

    def is_little(self, texts: Sequence[Text], prompt: str) -> bool:
        """Return whether texts are so short that `tokenize_little` may run them in any thread."""
        return sum(map(characters, texts)) + (_TEXT_COST + len(prompt)) * len(texts) <= _FEW_CHARACTERS

    def tokenize_little(self, texts: Sequence[Text], prompt: str) -> tuple[TokenizedTexts, int]:
        """Do what `tokenize` does, but in the calling thread."""
        return self._tokenize(texts, prompt), self._left_out(prompt)

    async def tokenize(self, texts: Sequence[Text], options: CallOptions) -> tuple[TokenizedTexts, int]:
        """Tokenize `texts`, with the prompt before each.

        Returns the tokens, and how many leading tokens pooling leaves out.
        """
        prompt = options.prompt
        skip = await self._run(options, self._left_out, prompt) if prompt else 0
        sizes = np.fromiter(map(characters, texts), np.int64, len(texts))
        pieces = [
            await self._run(options, self._tokenize, texts[rows[0] : rows[-1] + 1], prompt, options.other_side)
            for rows in cut_in_order(sizes, _PIECE_CHARACTERS, _PIECE_TEXTS)
        ]
        return TokenizedTexts.joined((piece, np.arange(len(piece.lengths))) for piece in pieces), skip

    async def check(self, token_ids: Sequence[Sequence[int]], options: CallOptions) -> TokenizedTexts:
        """Check texts that were tokenized elsewhere, and cut those over the limit."""
        if sum(map(len, token_ids)) <= _FEW_CHARACTERS and not options.other_side:
            return self._pipeline.tokenizer.tokenized(token_ids)
        return await self._run(options, lambda: self.tokenizer(options.other_side).tokenized(token_ids))

    def close(self) -> None:
        """Accept no more pieces, and wait for those under way."""
        for thread in self._threads.values():
            thread.shutdown()

    def _tokenize(self, texts: Sequence[Text], prompt: str, other_side: bool = False) -> TokenizedTexts:
        return _without_panic(self.tokenizer(other_side), prepend(prompt, texts) if prompt else texts)

    def _left_out(self, prompt: str) -> int:
        return _without_panic(self._prompt_length, prompt) if prompt and not self._include_prompt else 0

    async def _run(self, options: CallOptions, function: Callable[..., Result], *arguments: object) -> Result:
        thread = self._threads[options.priority or INTERACTIVE]
        try:
            future = asyncio.get_running_loop().run_in_executor(thread, function, *arguments)
        except RuntimeError:  # the threads were shut down
            raise EngineError(CLOSED) from None
        return await within(future, options.deadline)


def _without_panic(function: Callable[[Argument], Result], argument: Argument) -> Result:
    """Call `function`, and turn a panic of the tokenizer into an `EngineError`.

    A panic is not an `Exception`, so it would end a worker.
    """
    try:
        return function(argument)
    except Exception:
        raise
    except BaseException as error:
        raise EngineError(f"the tokenizer failed: {error}") from error
