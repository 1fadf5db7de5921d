"""Imports a user's Python function by name, and calls it with a time limit."""

import asyncio
import importlib
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from fastp3o.calls.event_loop import GRACE, awaited
from fastp3o.calls.time_limit import TookTooLongError, limited
from fastp3o.calls.users_code import directory, restored
from fastp3o.errors import UserError, text_of, visible

LONG = 60.0  # seconds, after which a line says that a call takes long


# --- errors ---------------------------------------------------------------------------------------


class FunctionError(UserError):
    """A user's function raised, ended the program, or returned what it must not."""


class FunctionInterruptedError(KeyboardInterrupt):
    """A user's function raised KeyboardInterrupt, such as one that a library makes of Ctrl-C."""


def told(error: BaseException) -> str:
    """The place where users' code raised an error, and its message."""
    # `extract_tb` obeys sys.tracebacklimit.
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{frame.f_code.co_filename}, line {line}: {visible(type(error).__name__)}: {text_of(error)}"


def raised_by_itself(error: BaseException) -> bool:
    """Whether users' code has raised this for itself, as its result. Otherwise somebody wants it to
    end: a time limit, Ctrl-C, or the cancellation of the task in which it runs.
    """
    if isinstance(error, KeyboardInterrupt):
        # Signals come to the main thread alone; a run has a handler that raises nothing.
        is_main = threading.current_thread() is threading.main_thread()
        return not (is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    if isinstance(error, asyncio.CancelledError):
        with suppress(RuntimeError):  # no event loop runs here
            task = asyncio.current_task()
            return task is None or not task.cancelling()
    return not isinstance(error, TookTooLongError)


# --- import and call ------------------------------------------------------------------------------


def import_function(name: str, role: str) -> Callable:
    """Imports a function; modules of the current directory are found, too.

    Args:
        name: module, as Python imports it or as the path of its file, and function:
            `module:function`.
        role: what the function is for, in error messages ("reward function").

    Raises:
        ValueError: the name has another form, module or function do not exist, it is no function,
            or a module that the file of a path hides is imported already.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        meant = f": it is {colon}" if (colon := colon_form(name)) else ""
        raise UserError(f"the {role} must be given as module:function, got {name!r}{meant}")
    folder, module = folder_and_module(module)
    sys.path.insert(0, folder)
    try:
        with restored():
            imported = importlib.import_module(module)
            function = getattr(imported, attribute)
    except (Exception, SystemExit) as error:
        # a module is a program of the user's and may raise anything
        kind = (
            "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        )
        near = (
            nearest(attribute, sys.modules.get(module)) if isinstance(error, AttributeError) else ""
        )
        raise UserError(f"cannot load the {role} {name!r}: {kind}{text_of(error)}{near}") from error
    finally:
        with suppress(ValueError):  # the module has removed it
            sys.path.remove(folder)
    file = getattr(imported, "__file__", None)
    if is_file(name) and (file is None or not os.path.samefile(file, name.partition(":")[0])):
        raise UserError(
            f"cannot load the {role} {name!r}: another module {module} is imported already"
        )
    if not callable(function):
        raise UserError(
            f"cannot load the {role} {name!r}: it is a {type(function).__name__}, not a function"
        )
    return function


def colon_form(name: str) -> str | None:
    """`module:function` for a name with dots alone, if its first parts are a module of the current
    directory or of sys.path; None for any other name. Nothing is imported.
    """
    parts, places = name.split("."), [os.getcwd(), *sys.path]
    if len(parts) == 1 or not all(part.isidentifier() for part in parts):
        return None
    specs = []
    for part in parts:
        if (spec := PathFinder.find_spec(part, places)) is None:
            break
        specs.append(spec)
        places = [*(spec.submodule_search_locations or [])]
    if not specs or specs[-1].origin is None:  # a folder without code is a module, too
        return None
    if len(specs) == len(parts):
        return f"{name}:FUNCTION"
    return ":".join(name.rsplit(".", 1))


def is_file(name: str) -> bool:
    """Whether a function's name has the path of a file in place of its module."""
    module = name.partition(":")[0]
    return "/" in module or (module.endswith(".py") and os.path.exists(module))


def folder_and_module(module: str) -> tuple[str, str]:
    """The folder that Python looks for a module in, and the module's name there. module: may be the
    path of a file.
    """
    if not is_file(module):
        return os.getcwd(), module
    return str(Path(module).parent.absolute()), Path(module).name.removesuffix(".py")


def nearest(name: str, module: ModuleType | None) -> str:
    """The function of a module that a misspelt name is nearest to, as the end of a message."""
    functions = (
        [other for other, value in vars(module).items() if callable(value)] if module else []
    )
    near = get_close_matches(name, functions, n=1)
    return f"; the nearest one is {near[0]}" if near else ""


def call_for_list(
    function: Callable,
    name: str,
    *arguments: list,
    timeout: float | None = None,
    option: str = "--reward_timeout",
) -> list:
    """Calls the function and returns its result as a list, with one entry for each of the last
    argument's. The result may be a list, a tuple, an array or a tensor; an `async def` is awaited.
    timeout: in seconds; None for no limit. option: that says it, in messages.

    The function may change the lists that it gets and the working directory. Raises FunctionError,
    with the function's name, if it returns another type or another number of entries, if it raises
    (with the place) or takes too long, and if it ends the program, which would look like the end of
    a run, or the event loop; and FunctionInterruptedError after a KeyboardInterrupt.
    """
    expected = len(arguments[-1])
    late = f"{name} has not returned after {timeout:g} s ({option})" if timeout else ""
    try:
        with restored(), warned_if_late(name, timeout, late, option):
            with limited(timeout):
                result = function(*arguments)
            if inspect.iscoroutine(result):
                result = awaited(result, timeout)
    except KeyboardInterrupt as error:
        raise FunctionInterruptedError(f"{name} raised KeyboardInterrupt") from error
    except TookTooLongError as error:
        *_, (frame, line), (last, _) = traceback.walk_tb(error.__traceback__)
        # If the function has continued after the alarm, it is unknown where it was.
        place = (
            f": it was in {frame.f_code.co_filename}, line {line}"
            if last.f_code.co_name == "ring"
            else ""
        )
        raise FunctionError(late + place) from error
    except SystemExit as error:
        ended = f"ended the program (sys.exit, status {error.code!r}) instead of returning"
        raise FunctionError(f"{name} {ended}") from error
    except BaseException as error:
        # asyncio's CancelledError and the panics of Rust's libraries are no Exception
        raise FunctionError(f"{name} failed in {told(error)}") from error
    wrong = f"{name} must return a list of {expected} entries, got a {type(result).__name__}"
    try:
        with limited(timeout):  # what it has returned is the user's code, too
            result = result.tolist() if hasattr(result, "tolist") else result
            result = list(result) if isinstance(result, list | tuple) else None
    except BaseException as error:
        raise FunctionError(
            f"{wrong} that gives no list: {type(error).__name__}: {text_of(error)}"
        ) from error
    if result is None:
        raise FunctionError(wrong)
    if len(result) != expected:
        raise FunctionError(
            f"{name} must return {expected} entries, one a response, got {len(result)}"
        )
    return result


# --- calls that are late --------------------------------------------------------------------------


@contextmanager
def warned_if_late(name: str, timeout: float | None, late: str, option: str) -> Iterator[None]:
    """Says on standard error that a call takes long, and that it is late: not everything can be
    interrupted.
    """
    lines = {timeout + GRACE: late} if timeout else {}
    if timeout and timeout > LONG:
        lines[LONG] = f"{name} has not returned after {LONG:g} s; it has {timeout:g} ({option})"
    timers = [
        threading.Timer(seconds, print, [line], {"file": sys.stderr})
        for seconds, line in lines.items()
    ]
    if timeout and isinstance(thread := threading.current_thread(), Background):
        timers.append(threading.Timer(timeout + GRACE, thread.leave_behind, [FunctionError(late)]))
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


class Background(threading.Thread):
    """A call in a thread of its own, for which the end of a program does not wait. No alarm rings
    in it: once a user's function there is late, `result` has its error, and the thread is left
    behind.
    """

    def __init__(self, call: Callable[[], Any]):
        super().__init__(daemon=True)
        self.call, self.result = call, Future[Any]()
        directory.hold(self)  # here, where no user's code runs yet
        self.start()

    def run(self) -> None:
        with suppress(InvalidStateError):  # it was late
            try:
                self.result.set_result(self.call())
            except BaseException as error:
                self.result.set_exception(error)
            finally:
                directory.release(self)

    def leave_behind(self, error: FunctionError) -> None:
        """Makes an error the result of a call that nobody waits for any more."""
        self.result.set_exception(error)
        directory.leave_behind(self)
