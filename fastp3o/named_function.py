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
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from fastp3o.errors import UserError, text_of, visible

GRACE = 2.0  # seconds
LONG = 60.0  # seconds, after which a line says that a call takes long
LOOK = 0.5  # seconds between looks at whether an event loop continues
OF_TASKS = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR
end_process = os._exit  # while users' code runs, `os._exit` is `end_by_error`


# --- errors -----------------------------------------------------------------------------------------------------------


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


# --- import and call --------------------------------------------------------------------------------------------------


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


def call_for_list(
    function: Callable, name: str, *arguments: list, timeout: float | None = None, option: str = "--reward_timeout"
) -> list:
    """Calls the function and returns its result as a list, with one entry for each of the last argument's. The result
    may be a list, a tuple, an array or a tensor; an `async def` is awaited. timeout: in seconds; None for no limit.
    option: that says it, in messages.

    The function may change the lists that it gets and the working directory. Raises FunctionError, with the function's
    name, if it returns another type or another number of entries, if it raises (with the place) or
    takes too long, and if it ends the program, which would look like the end of a run, or the event loop; and
    FunctionInterruptedError after a KeyboardInterrupt.
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
        # If the function has gone on after the alarm, nobody knows where it was.
        place = f": it was in {frame.f_code.co_filename}, line {line}" if last.f_code.co_name == "ring" else ""
        raise FunctionError(late + place) from error
    except SystemExit as error:
        ended = f"ended the program (sys.exit, status {error.code!r}) instead of returning"
        raise FunctionError(f"{name} {ended}") from error
    except BaseException as error:  # asyncio's CancelledError and the panics of Rust's libraries are no Exception
        raise FunctionError(f"{name} failed in {told(error)}") from error
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


def told(error: BaseException) -> str:
    """The place where users' code raised an error, and its message."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)  # `extract_tb` obeys sys.tracebacklimit
    return f"{frame.f_code.co_filename}, line {line}: {visible(type(error).__name__)}: {text_of(error)}"


# --- time limits ------------------------------------------------------------------------------------------------------


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
def warned_if_late(name: str, timeout: float | None, late: str, option: str) -> Iterator[None]:
    """Says on standard error that a call takes long, and that it is late: not everything can be interrupted."""
    lines = {timeout + GRACE: late} if timeout else {}
    if timeout and timeout > LONG:
        lines[LONG] = f"{name} has not returned after {LONG:g} s; it has {timeout:g} ({option})"
    timers = [threading.Timer(seconds, print, [line], {"file": sys.stderr}) for seconds, line in lines.items()]
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


def raised_by_itself(error: BaseException) -> bool:
    """Whether users' code has raised this for itself, as its result. Otherwise somebody wants it to end: a time limit,
    Ctrl-C, or the cancellation of the task in which it runs.
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


# --- coroutines, in a loop and threads of their own -------------------------------------------------------------------


class LoopThread(threading.Thread):
    """An event loop that continues, whatever its tasks and callbacks raise, or if they stop it. ends: what callbacks
    have raised to end the program.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.loop, self.ends = asyncio.new_event_loop(), list[BaseException]()
        self.loop.set_default_executor(Workers())
        self.start()

    def run(self) -> None:
        while not self.loop.is_closed():
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                # A task keeps what it has raised for those that wait for it; of a callback nobody would learn.
                if not any(frame.f_code.co_flags & OF_TASKS for frame, _ in traceback.walk_tb(error.__traceback__)):
                    self.ends.append(error)
            except BaseException as error:  # the loop itself is broken
                self.ends.append(error)
                return


class Workers(ThreadPoolExecutor):
    """The threads of an event loop, as its own are. Python 3.11 waits for ever for one that raises StopIteration."""

    def submit(self, function: Callable, /, *arguments: Any, **named: Any) -> Future:
        def call() -> Any:
            try:
                return function(*arguments, **named)
            except StopIteration as error:
                raise RuntimeError("StopIteration") from error

        return super().submit(call)


@cache
def event_loop(process: int) -> LoopThread:
    """The event loop of all coroutines of a process: a client that a module keeps belongs to the loop in which it was
    first used. It runs in a thread of its own, since a notebook's runs in the caller's.
    """
    return LoopThread()


def awaited(coroutine: Coroutine, timeout: float | None) -> Any:
    """The coroutine's result. Raises TookTooLongError if there is none after `timeout` seconds; it may continue then.
    Raises what a callback has raised meanwhile to end the program, and RuntimeError once the event loop has ended.
    """

    async def settled() -> tuple[Any, BaseException | None]:
        try:
            return await coroutine, None
        except BaseException as error:
            return None, error

    thread = event_loop(os.getpid())
    if not thread.is_alive():
        event_loop.cache_clear()
        thread = event_loop(os.getpid())
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
        if not goes_on(thread, future):
            event_loop.cache_clear()
        raise
    if error is not None:
        raise error
    return result


def goes_on(thread: LoopThread, given_up: Future) -> bool:
    """Cancels a call, and says whether its event loop continues. Code that blocks it is left behind, with the loop."""
    if not thread.is_alive():
        return False
    given_up.cancel()
    try:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), thread.loop).result(GRACE)
    except TimeoutError:
        return False
    return True


# --- a process as users' code found it --------------------------------------------------------------------------------


class Directory:
    """The working directory, which users' code may change for the whole process. A thread that puts it back, while
    another's code has changed it for a while, takes it from that. So the main thread alone puts it back, to what it was
    when no thread ran users' code, and only when no other thread does. A thread that is left behind counts no more.

    holders, running: threads, each as often as it has begun.
    """

    def __init__(self) -> None:
        self.lock, self.here = threading.Lock(), threading.local()
        self.holders, self.running = list[threading.Thread](), list[threading.Thread]()
        self.before = self.left = self.now()

    @staticmethod
    def now() -> str | None:
        with suppress(OSError):  # the folder was removed: nothing is relative to it any more
            return os.getcwd()
        return None

    def hold(self, thread: threading.Thread) -> None:
        """Until `release`, the directory counts as the run's, unless users' code has left it behind."""
        with self.lock:
            if not self.holders and (now := self.now()) != self.left:
                self.before = now
            self.holders.append(thread)

    def release(self, thread: threading.Thread) -> None:
        with self.lock:
            if thread in self.holders:
                self.holders.remove(thread)
                self.left = self.now()

    def leave_behind(self, thread: threading.Thread) -> None:
        with self.lock:
            self.holders = [other for other in self.holders if other is not thread]
            self.running = [other for other in self.running if other is not thread]
            if not self.running:
                os._exit = end_process

    @contextmanager
    def changeable(self) -> Iterator[None]:
        """Users' code runs in this thread."""
        thread = threading.current_thread()
        with self.lock:
            self.put_back()
            self.running.append(thread)
            os._exit = end_by_error
        outer, self.here.runs = self.runs_here, True
        try:
            yield
        finally:
            self.here.runs = outer
            with self.lock:
                if thread in self.running:
                    self.running.remove(thread)
                self.put_back()
                if not self.running:
                    os._exit = end_process

    @property
    def runs_here(self) -> bool:
        return getattr(self.here, "runs", False)

    def put_back(self) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and self.before is not None and not self.running:
            with suppress(OSError):
                os.chdir(self.before)


directory = Directory()


def end_by_error(status: int) -> NoReturn:
    """What users' code gets as `os._exit`, which ends a run without a word, and with status 0 as if it were finished:
    raises SystemExit. In other threads the process ends.
    """
    if directory.runs_here or isinstance(threading.current_thread(), LoopThread):
        raise SystemExit(status)
    end_process(status)


def begin_fork() -> None:
    """A process that users' code has forked ends as it wants to, and has locks that nobody holds."""
    os._exit, directory.lock = end_process, threading.Lock()


os.register_at_fork(after_in_child=begin_fork)


@contextmanager
def restored() -> Iterator[None]:
    """Users' code runs in this thread; the working directory that it changes is put back."""
    thread = threading.current_thread()
    directory.hold(thread)
    try:
        with directory.changeable():
            yield
    finally:
        directory.release(thread)
