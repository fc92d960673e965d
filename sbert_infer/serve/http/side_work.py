"""Work without a model: in threads of its own, so that a flood of it delays nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from sbert_infer.serve.http.body import while_connected
from sbert_infer.serve.wire.problems import Problem

Result = TypeVar("Result")

_THREADS = 2
_MOST = 64  # calls that run or wait


class SideWork:
    """A few threads, and a queue with a bound."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_THREADS, "side-work")
        self._calls = 0

    async def run(self, request: Request, work: Callable[[], Result]) -> Result:
        """Do some work, unless the client leaves, too much waits, or it takes too long."""
        if self._calls >= _MOST:
            raise Problem("overloaded", "too many such requests at once: try again later", retry_after_s=1.0)
        self._calls += 1
        try:
            done = asyncio.get_running_loop().run_in_executor(self._threads, work)
            return await while_connected(request, asyncio.wait_for(done, self._timeout_s))
        except asyncio.TimeoutError:
            message = "it was not done in time: send fewer texts at once, or try again later"
            raise Problem("timeout", message, retry_after_s=1.0) from None
        finally:
            self._calls -= 1
