"""One event loop in a thread of its own: it works inside Jupyter's loop, and clients keep their connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, wait
from typing import Any, TypeVar

T = TypeVar("T")
_running: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []
_LOOK = 0.2
"""Seconds between looks whether the loop still runs."""


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, which ends with the wait for it, as by Ctrl-C.

    A `RuntimeError` where it stops the loop, or cancels everything that waits in it.
    """
    if not (_running and _running[-1][1].is_alive()):
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(loop,), name="grade's event loop", daemon=True)
        thread.start()
        _running[:] = [(loop, thread)]
    loop, thread = _running[-1]
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        while not wait([future], _LOOK).done:
            if not thread.is_alive() and not future.done():
                raise RuntimeError("the event loop was stopped")
        return future.result()
    except CancelledError:
        raise RuntimeError("everything in the event loop was cancelled") from None
    finally:
        future.cancel()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()  # until something in it stops it: then nothing may go on waiting
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
