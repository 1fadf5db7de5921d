"""Event loops in threads of their own, in which users' coroutines and our requests run whatever the
caller does.
"""

import asyncio
import inspect
import os
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import inf
from typing import Any

from fastp3o.calls.time_limit import TookTooLongError

GRACE = 2.0  # seconds
LOOK = 0.5  # seconds between looks at whether an event loop continues
OF_TASKS = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR


class LoopThread(threading.Thread):
    """An event loop that continues, whatever its tasks and callbacks raise, or if they stop it.
    ends: what callbacks have raised to end the program. left: behind, for another loop.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.loop, self.ends, self.left = asyncio.new_event_loop(), list[BaseException](), False
        self.loop.set_default_executor(Workers())
        self.start()

    def run(self) -> None:
        while not self.loop.is_closed():
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                # A task keeps what it has raised for those that wait for it; of a callback nobody
                # would learn.
                if not any(
                    frame.f_code.co_flags & OF_TASKS
                    for frame, _ in traceback.walk_tb(error.__traceback__)
                ):
                    self.ends.append(error)
            except BaseException as error:  # the loop itself is broken
                self.ends.append(error)
                return


class Workers(ThreadPoolExecutor):
    """The threads of an event loop, as its own are. Python 3.11 waits for ever for one that raises
    StopIteration.
    """

    def submit(self, function: Callable, /, *arguments: Any, **named: Any) -> Future:
        def call() -> Any:
            try:
                return function(*arguments, **named)
            except StopIteration as error:
                raise RuntimeError("StopIteration") from error

        return super().submit(call)


LOOPS: dict[tuple[int, str], LoopThread] = {}  # by process and what they run


def event_loop(runs: str) -> LoopThread:
    """The event loop of this process for coroutines of one kind: a client belongs to the loop in
    which it was first used. It runs in a thread of its own, since a notebook's runs in the
    caller's.

    runs: "users' code" or "requests". Users' code may block, break or close its loop, which then is
    left behind; our requests continue in theirs.
    """
    thread = LOOPS.get((os.getpid(), runs))
    if thread is None or thread.left or not thread.is_alive():
        thread = LOOPS[os.getpid(), runs] = LoopThread()
    return thread


def awaited(coroutine: Coroutine, timeout: float | None) -> Any:
    """The coroutine's result. Raises TookTooLongError if there is none after `timeout` seconds; it
    may continue then. Raises what a callback has raised meanwhile to end the program, and
    RuntimeError once the event loop has ended.
    """

    async def settled() -> tuple[Any, BaseException | None]:
        try:
            return await coroutine, None
        except BaseException as error:
            return None, error

    thread = event_loop("users' code")
    ends, latest = len(thread.ends), time.monotonic() + (timeout or inf)
    future = asyncio.run_coroutine_threadsafe(settled(), thread.loop)
    try:
        while not wait([future], timeout=max(0.0, min(LOOK, latest - time.monotonic()))).done:
            if len(thread.ends) > ends:
                raise thread.ends[ends]
            if not thread.is_alive():
                raise RuntimeError("its code has closed the event loop")
            if time.monotonic() >= latest:
                raise TookTooLongError(timeout)
        result, error = future.result()
    except BaseException:
        thread.left = not continues(thread, future)
        raise
    if error is not None:
        raise error
    return result


def continues(thread: LoopThread, given_up: Future) -> bool:
    """Cancels a call, and says whether its event loop continues. Code that blocks it is left
    behind, with the loop.
    """
    if not thread.is_alive():
        return False
    given_up.cancel()
    try:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), thread.loop).result(GRACE)
    except TimeoutError:
        return False
    return True
