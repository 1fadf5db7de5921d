"""Imports and calls a user's Python function, given by name."""

import asyncio
import importlib
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

from fastp3o.errors import UserError
from fastp3o.time_limit import TookTooLongError, time_limit

Result = TypeVar("Result")


class FunctionError(UserError):
    """A user's function raised, ended the program, or returned what it must not."""


GRACE = 2.0  # seconds
LONG = 60.0  # seconds, after which a call is said to take long

# One for all calls: a client that a module keeps belongs to the loop in which it was first used.
EVENT_LOOP = asyncio.Runner()


def import_function(name: str, role: str) -> Callable:
    """Imports the function that `name` gives as `module:function`; modules of the current directory are found, too.

    Args:
        name: module, as Python imports it, and function.
        role: what the function is for, in error messages ("reward function").

    Raises:
        ValueError: the name has another form, module or function do not exist, or it is no function.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise UserError(f"the {role} must be given as module:function, got {name!r}")
    if "/" in module or module.startswith(".") or (module.endswith(".py") and os.path.exists(module)):
        raise UserError(
            f"the {role} {name!r} names a file: give its module as Python imports it, {Path(module).stem}:{function}, "
            f"and start in the file's folder"
        )
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        with restored():
            found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # a module is a program of the user's and may raise anything
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise UserError(f"cannot load the {role} {name!r}: {kind}{error}") from error
    finally:
        with suppress(ValueError):  # the module has removed it
            sys.path.remove(folder)
    if not callable(found):
        raise UserError(f"cannot load the {role} {name!r}: it is a {type(found).__name__}, not a function")
    return found


def call_for_list(function: Callable, name: str, *arguments: list[str], timeout: float | None = None) -> list:
    """Calls the function and returns its result as a list, with one entry for each of the last argument's. The result
    may be a list, a tuple, an array or a tensor; an `async def` is awaited. It has `timeout` seconds, if any are given.

    The function may change the lists that it gets, the working directory and torch's defaults.

    Raises FunctionError, with the function's name, if it returns another type or another number of entries, if it
    raises (with the place) or takes too long, and if it ends the program, which would look like the end of a run.
    """
    expected = len(arguments[-1])
    try:
        with restored(), ends_forks(name), stays_in_process(), said_if_late(name, timeout):
            with limited(timeout):
                result = function(*arguments)
            if inspect.iscoroutine(result):
                result = awaited(within(result, name, timeout))
    except (KeyboardInterrupt, FunctionError):
        raise
    except TookTooLongError as error:
        raise FunctionError(late(name, timeout) + place(error)) from error
    except SystemExit as error:
        raise FunctionError(
            f"{name} ended the program (sys.exit or os._exit, status {error.code!r}) instead of returning"
        ) from error
    except BaseException as error:  # asyncio's CancelledError and the panics of Rust's libraries are no Exception
        last = traceback.extract_tb(error.__traceback__)[-1]
        kind = type(error).__name__
        raise FunctionError(f"{name} failed in {last.filename}, line {last.lineno}: {kind}: {error}") from error
    try:
        result = result.tolist() if hasattr(result, "tolist") else result
    except Exception as error:
        raise FunctionError(
            f"{name} must return a list of {expected} entries, got a {type(result).__name__} that gives no list: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(result, list | tuple):
        raise FunctionError(f"{name} must return a list of {expected} entries, got a {type(result).__name__}")
    if len(result) != expected:
        raise FunctionError(f"{name} must return {expected} entries, one a response, got {len(result)}")
    return list(result)


@contextmanager
def restored() -> Iterator[None]:
    """Puts back what a user's code may change for the whole process: the working directory, to which a run's paths are
    relative, and how torch computes by default.
    """
    folder, gradients = os.getcwd(), torch.is_grad_enabled()
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    try:
        yield
    finally:
        os.chdir(folder)
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
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


@contextmanager
def stays_in_process() -> Iterator[None]:
    """Makes os._exit in the main thread what sys.exit is: nobody could tell such an end from that of a finished run.
    Forked processes end by it as ever.
    """
    process, leave = os.getpid(), os._exit

    def leave_function(status: int) -> NoReturn:
        if os.getpid() == process and threading.current_thread() is threading.main_thread():
            raise SystemExit(status)
        leave(status)

    os._exit = leave_function
    try:
        yield
    finally:
        os._exit = leave


def limited(seconds: float | None) -> AbstractContextManager[None]:
    """The time limit of a call. There is none beside an alarm of the function's own module."""
    free = signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, signal.SIG_IGN)
    return time_limit(seconds) if seconds and free else nullcontext()


@contextmanager
def said_if_late(name: str, seconds: float | None) -> Iterator[None]:
    """Says on standard error that a call takes long, and soon after its time limit that it is late: not everything can
    be interrupted.
    """
    said = {} if seconds is None else {seconds + GRACE: late(name, seconds)}
    if seconds is not None and seconds > LONG:
        said[LONG] = f"{name} has not returned after {LONG:g} s; it has {seconds:g} (--reward_timeout)"
    clocks = [threading.Timer(after, print, [line], {"file": sys.stderr}) for after, line in said.items()]
    for clock in clocks:
        clock.daemon = True
        clock.start()
    try:
        yield
    finally:
        for clock in clocks:
            clock.cancel()


def late(name: str, seconds: float | None) -> str:
    return f"{name} has not returned after {seconds:g} s (--reward_timeout)"


def place(error: TookTooLongError) -> str:
    """Where the alarm has rung, in words; "" if the function has gone on after it."""
    *frames, last = traceback.extract_tb(error.__traceback__)
    return f": it was in {frames[-1].filename}, line {frames[-1].lineno}" if last.name == "stop" else ""


async def within(coroutine: Coroutine[object, None, Result], name: str, timeout: float | None) -> Result:
    """Raises FunctionError if the coroutine has no result after `timeout` seconds, also if it takes no cancelling."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.wait({task}, timeout=timeout)
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=1)
        raise FunctionError(late(name, timeout))
    return task.result()


def awaited(coroutine: Coroutine[object, None, Result]) -> Result:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return EVENT_LOOP.run(coroutine)
    # A thread runs one loop, and this one runs a notebook's.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(EVENT_LOOP.run, coroutine).result()
