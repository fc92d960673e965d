"""Work in a daemon thread: unlike an executor's threads, it is not waited for at exit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def in_daemon_thread(name: str, function: Callable[[], Result]) -> Future[Result]:
    """Call `function` in a thread called `name`, which does not keep the process alive."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # it can't be cancelled

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True, name=name).start()
    return future
