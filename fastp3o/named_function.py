"""Imports a user's Python function by name, and calls it with a time limit."""

import asyncio
import importlib
import inspect
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fastp3o.errors import UserError, text_of, visible

GRACE = 2.0  # seconds
LONG = 60.0  # seconds, after which a line says that a call takes long


class FunctionError(UserError):
    """A user's function raised, ended the program, or returned what it must not."""


class FunctionInterruptedError(KeyboardInterrupt):
    """A user's function raised KeyboardInterrupt, such as one that a library makes of Ctrl-C."""


class TookTooLongError(BaseException):
    """Code reached its time limit, the argument, in seconds. No Exception, so that the code does not catch it."""


class Background(threading.Thread):
    """A call in a thread of its own, for which the end of a program does not wait. No alarm rings in it: once a user's
    function there is late, `result` has its error, and the thread is left behind.
    """

    def __init__(self, call: Callable[[], Any]):
        super().__init__(daemon=True)
        self.call, self.result = call, Future[Any]()
        self.start()

    def run(self) -> None:
        with suppress(InvalidStateError):  # it was late
            try:
                self.result.set_result(self.call())
            except BaseException as error:
                self.result.set_exception(error)


def import_function(name: str, role: str) -> Callable:
    """Imports a function; modules of the current directory are found, too.

    Args:
        name: module, as Python imports it, and function, as `module:function`.
        role: what the function is for, in error messages ("reward function").

    Raises:
        ValueError: the name has another form, module or function do not exist, or it is no function.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UserError(f"the {role} must be given as module:function, got {name!r}")
    if "/" in module or module.startswith(".") or (module.endswith(".py") and os.path.exists(module)):
        imported = f"{Path(module).stem}:{attribute}, and start in the file's folder"
        raise UserError(f"the {role} {name!r} names a file: give its module as Python imports it, {imported}")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        with restored():
            function = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a module is a program of the user's and may raise anything
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise UserError(f"cannot load the {role} {name!r}: {kind}{text_of(error)}") from error
    finally:
        with suppress(ValueError):  # the module has removed it
            sys.path.remove(folder)
    if not callable(function):
        raise UserError(f"cannot load the {role} {name!r}: it is a {type(function).__name__}, not a function")
    return function


def call_for_list(function: Callable, name: str, *arguments: list[str], timeout: float | None = None) -> list:
    """Calls the function and returns its result as a list, with one entry for each of the last argument's. The result
    may be a list, a tuple, an array or a tensor; an `async def` is awaited. timeout: in seconds; None for no limit.

    The function may change the lists that it gets, the working directory and torch's defaults. Raises FunctionError,
    with the function's name, if it returns another type or another number of entries, if it raises (with the place) or
    takes too long, and if it ends the program, which would look like the end of a run; and FunctionInterruptedError
    after a KeyboardInterrupt.
    """
    expected = len(arguments[-1])
    late = f"{name} has not returned after {timeout:g} s (--reward_timeout)" if timeout else ""
    try:
        with restored(), warned_if_late(name, timeout, late):
            with limited(timeout):
                result = function(*arguments)
            if inspect.iscoroutine(result):
                result = awaited(result, timeout)
    except KeyboardInterrupt as error:
        raise FunctionInterruptedError(f"{name} raised KeyboardInterrupt") from error
    except TookTooLongError as error:
        *_, (frame, line), (last, _) = traceback.walk_tb(error.__traceback__)
        # If the function has gone on after the alarm, nobody knows where it was.
        place = f": it was in {frame.f_code.co_filename}, line {line}" if last.f_code.co_name == "ring" else ""
        raise FunctionError(late + place) from error
    except SystemExit as error:
        ended = f"ended the program (sys.exit, status {error.code!r}) instead of returning"
        raise FunctionError(f"{name} {ended}") from error
    except BaseException as error:  # asyncio's CancelledError and the panics of Rust's libraries are no Exception
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)  # `extract_tb` obeys sys.tracebacklimit
        what = f"{visible(type(error).__name__)}: {text_of(error)}"
        raise FunctionError(f"{name} failed in {frame.f_code.co_filename}, line {line}: {what}") from error
    wrong = f"{name} must return a list of {expected} entries, got a {type(result).__name__}"
    try:
        with limited(timeout):  # what it has returned is the user's code, too
            result = result.tolist() if hasattr(result, "tolist") else result
            result = list(result) if isinstance(result, list | tuple) else None
    except BaseException as error:
        raise FunctionError(f"{wrong} that gives no list: {type(error).__name__}: {text_of(error)}") from error
    if result is None:
        raise FunctionError(wrong)
    if len(result) != expected:
        raise FunctionError(f"{name} must return {expected} entries, one a response, got {len(result)}")
    return result


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TookTooLongError after this many seconds in the context: where the code is, and at its end if it has
    caught that. The clock is a signal, SIGALRM, so it stops only Python code in the main thread; other threads have no
    limit, and code that sets an alarm of its own has that one. An outer limit waits for the end of an inner one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    rung = False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rung
        rung = True
        raise TookTooLongError(seconds)

    handler, began = signal.signal(signal.SIGALRM, ring), time.monotonic()
    outer, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        # A handler that the code has installed to stay is not ours to remove.
        if signal.getsignal(signal.SIGALRM) is ring:
            signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, outer and max(outer + began - time.monotonic(), 1e-6), interval)
    if rung:
        raise TookTooLongError(seconds)


def limited(seconds: float | None) -> AbstractContextManager[None]:
    """The time limit of a user's code. There is none beside an alarm of the program's own."""
    free = signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, signal.SIG_IGN)
    return time_limit(seconds) if seconds and free else nullcontext()


@contextmanager
def warned_if_late(name: str, timeout: float | None, late: str) -> Iterator[None]:
    """Says on standard error that a call takes long, and that it is late: not everything can be interrupted."""
    lines = {timeout + GRACE: late} if timeout else {}
    if timeout and timeout > LONG:
        lines[LONG] = f"{name} has not returned after {LONG:g} s; it has {timeout:g} (--reward_timeout)"
    timers = [threading.Timer(seconds, print, [line], {"file": sys.stderr}) for seconds, line in lines.items()]
    if timeout and isinstance(thread := threading.current_thread(), Background):
        timers.append(threading.Timer(timeout + GRACE, thread.result.set_exception, [FunctionError(late)]))
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


@cache
def event_loop(process: int) -> asyncio.AbstractEventLoop:
    """One for all coroutines of a process: a client that a module keeps belongs to the loop in which it was first used.
    It runs in a thread of its own, since a notebook's runs in the caller's.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def awaited(coroutine: Coroutine, timeout: float | None) -> Any:
    """The coroutine's result. Raises TookTooLongError if there is none after `timeout` seconds; it may go on then."""

    async def settled() -> tuple[Any, BaseException | None]:
        try:
            return await coroutine, None
        except BaseException as error:  # KeyboardInterrupt and SystemExit would end the loop
            return None, error

    loop = event_loop(os.getpid())
    future = asyncio.run_coroutine_threadsafe(settled(), loop)
    try:
        result, error = future.result(timeout)
    except TimeoutError as late:
        future.cancel()
        try:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(GRACE)
        except TimeoutError:
            event_loop.cache_clear()  # it blocks the loop, which is left behind with it
        raise TookTooLongError(timeout) from late
    if error is not None:
        raise error
    return result


@contextmanager
def restored() -> Iterator[None]:
    """Puts back what users' code changes for the whole process: the working directory, to which a run's paths are
    relative, whether torch computes gradients, and its default dtype and device.
    """
    with suppress(OSError):  # the folder was removed: nothing is relative to it any more
        folder = os.getcwd()
    grad, dtype, device = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()
    try:
        yield
    finally:
        with suppress(OSError, UnboundLocalError):
            os.chdir(folder)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            # A default that somebody has set costs each call into torch a little; the CPU is the one without.
            torch.set_default_device(None if device.type == "cpu" else device)
