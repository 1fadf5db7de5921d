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
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from fastp3o.errors import UserError, text_of, visible
from fastp3o.script import LastingStream

Result = TypeVar("Result")

GRACE = 2.0  # seconds
LONG = 60.0  # seconds, after which a line says that a call takes long

# What torch keeps for the whole process: how it is read, and set.
SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
)

# One for all calls: a client that a module keeps belongs to the loop in which it was first used. Threads take turns.
EVENT_LOOP, LOOP_IS_FREE = asyncio.Runner(), threading.Lock()
LEFT: list[asyncio.Runner] = []  # loops that are stuck or a parent's: closing one that a fork shares would stop it


def leave_loop() -> None:
    global EVENT_LOOP, LOOP_IS_FREE
    LEFT.append(EVENT_LOOP)
    EVENT_LOOP, LOOP_IS_FREE = asyncio.Runner(), threading.Lock()


os.register_at_fork(after_in_child=leave_loop)


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
        with restored(), ends_forks(name), warned_if_late(name, timeout, late):
            with limited(timeout):
                result = function(*arguments)
            if inspect.iscoroutine(result):
                with (
                    limited(timeout and timeout + GRACE),
                    LOOP_IS_FREE,
                ):  # it may block the loop, in which nothing else is timed
                    result, leaving = awaited(within(result, timeout))
                if leaving is not None:
                    raise leaving
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


async def within(coroutine: Coroutine, timeout: float | None) -> tuple[Any, BaseException | None]:
    """The coroutine's result, or what it has raised to end the program. Raises TookTooLongError if it has not returned
    after `timeout` seconds, also if it goes on.
    """

    async def held() -> tuple[Any, BaseException | None]:
        try:
            return await coroutine, None
        except (KeyboardInterrupt, SystemExit) as error:  # the loop would raise it again in the next call
            return None, error

    task = asyncio.ensure_future(held())
    await asyncio.wait({task}, timeout=timeout)
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=1)
        raise TookTooLongError(timeout)
    return task.result()


def awaited(coroutine: Coroutine[object, None, Result]) -> Result:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return EVENT_LOOP.run(coroutine)
    # A thread runs one loop, and this one runs a notebook's.
    result: Future[Result] = Background(lambda: EVENT_LOOP.run(coroutine)).result
    try:
        return result.result()
    finally:
        if not result.done():  # a coroutine that blocks is left behind
            leave_loop()


@contextmanager
def restored() -> Iterator[None]:
    """Puts back what a user's code may change for the whole process: the working directory, to which a run's paths are
    relative, and how torch computes by default. Another standard output or error stays, and ends nothing either.
    """
    with suppress(OSError):  # the folder was removed: nothing is relative to it any more
        folder = os.getcwd()
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    before, device = [get() for get, _ in SETTINGS], torch.get_default_device()
    autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")}
    try:
        yield
    finally:
        with suppress(OSError, UnboundLocalError):
            os.chdir(folder)
        for (get, put), value in zip(SETTINGS, before, strict=True):
            if get() != value:
                put(value)
        for name, stream in streams.items():
            if (other := getattr(sys, name, None)) is not stream:
                setattr(sys, name, LastingStream(other, tells=name == "stdout"))
        for kind, (enabled, precision) in autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, precision)
        if torch.get_default_device() != device:
            # A default that somebody has set costs each call into torch a little; the CPU is the one without.
            torch.set_default_device(None if device.type == "cpu" else device)


@contextmanager
def ends_forks(name: str) -> Iterator[None]:
    """Ends a process that a function has forked and that leaves it: it would go on with the run beside its parent."""
    process = os.getpid()
    status = 1
    try:
        yield
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        if os.getpid() != process:
            if status:
                with suppress(OSError):
                    os.write(2, f"{name} has forked a process that left the function; it is ended\n".encode())
            os._exit(status)
