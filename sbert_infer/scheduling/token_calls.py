"""Calls for token vectors: these run one at a time in a thread of their own, not in the queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from sbert_infer.encode.pipeline import Pipeline
from sbert_infer.scheduling.call import CallOptions, within
from sbert_infer.text.tokenizer import Tokenizer
from sbert_infer.types import Encoded


class TokenCalls:
    """The thread that runs calls for token vectors."""

    def __init__(self, pipeline: Pipeline, tokenizer: Callable[[bool], Tokenizer]) -> None:
        """Run texts by `pipeline`; `tokenizer` may return one that cuts at the opposite end."""
        self._pipeline, self._tokenizer = pipeline, tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sbert-infer-tokens")

    async def encode(self, texts: Sequence[str], options: CallOptions) -> Encoded:
        """Return a vector for each token. If abandoned, a call keeps the thread for one batch."""
        left = threading.Event()
        try:
            loop = asyncio.get_running_loop()
            return await within(loop.run_in_executor(self._thread, self._run, texts, options, left), options.deadline)
        finally:
            left.set()

    def close(self) -> None:
        """Start no more calls."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, texts: Sequence[str], options: CallOptions, left: threading.Event) -> Encoded:
        """Return token vectors, run batch by batch in this thread; raise once `left` is set."""
        windows = list(
            self._pipeline.run(
                texts,
                options.output,
                prompt=options.prompt,
                allow_truncation=options.on_truncate != "error",
                tokenizer=self._tokenizer(options.other_side),
                is_wanted=lambda: not left.is_set(),
            )
        )
        vectors = [each for window in windows for each in window.vectors]
        return Encoded(vectors, sum(map(len, vectors)), sum(window.stats.truncated for window in windows))
