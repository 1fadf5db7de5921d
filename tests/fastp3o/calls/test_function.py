"""A user's function by name: from an installed module or the current directory, or an error that
names it. And calls of functions: what they raise in an event loop, and what they change in the
process while other threads run.
"""

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastp3o.calls.function import (
    Background,
    FunctionError,
    FunctionInterruptedError,
    call_for_list,
    import_function,
)
from fastp3o.calls.time_limit import TookTooLongError
from fastp3o.run.fingerprints import function_fingerprint
from tests.fastp3o.torchrun import ROOT


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current directory."""
    (tmp_path / "judges_for_tests.py").write_text(
        "def longer(a, b):\n    return max(a, b, key=len)\n\nconstant = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "judges_for_tests", raising=False)


def test_a_function_of_the_current_directory_or_of_an_installed_package():
    before = list(sys.path)
    assert import_function("judges_for_tests:longer", "judge")("a", "bb") == "bb"
    assert import_function("os.path:basename", "judge")("a/b") == "b"
    assert sys.path == before


def test_a_function_that_is_not_there_is_named():
    before = list(sys.path)
    for names, message in {
        ("no_such_module:f", "judges_for_tests:f"): "cannot load the judge '\\w+:f'",
        ("judges_for_tests:constant",): "it is a int, not a function",
        ("judges_for_tests", ":f"): "must be given as module:function",
        (
            "judges_for_tests:longr",
            "./judges_for_tests.py:longr",
        ): "no attribute 'longr'; the nearest one is longer$",
        ("judges_for_tests.py:constants",): "no attribute 'constants'$",
        ("no_such/file.py:f",): "cannot load the judge 'no_such/file.py:f': No module named 'file'",
    }.items():
        for name in names:
            with pytest.raises(ValueError, match=message):
                import_function(name, "judge")
            assert sys.path == before


def test_the_path_of_a_file_stands_for_its_module(tmp_path: Path):
    path, inner = list(sys.path), tmp_path / "inner"
    inner.mkdir()
    (inner / "judges_within.py").write_text("def first(a, b):\n    return a\n")
    assert import_function("judges_for_tests.py:longer", "judge") is import_function(
        "judges_for_tests:longer", "judge"
    )
    for name in ("inner/judges_within.py:first", f"{inner}/judges_within.py:first"):
        assert import_function(name, "judge")("a", "bb") == "a"
        assert (
            function_fingerprint(name)
            == hashlib.sha256((inner / "judges_within.py").read_bytes()).hexdigest()
        )
    assert sys.path == path
    (tmp_path / "judges_within.py").write_text("def first(a, b):\n    return b\n")
    with pytest.raises(ValueError, match="another module judges_within is imported already"):
        import_function("./judges_within.py:first", "judge")


class Panic(BaseException):
    """As Rust's libraries raise."""


async def fails(error):
    raise error


async def in_a_gather(error):
    await asyncio.gather(fails(error), asyncio.sleep(0.01))


async def in_a_group(error):
    async with asyncio.TaskGroup() as group:
        group.create_task(fails(error))
        group.create_task(asyncio.sleep(0.01))


async def in_a_task_of_a_task(error):
    await asyncio.create_task(in_a_gather(error))


async def in_a_thread(error):
    def raises():
        raise error

    await asyncio.to_thread(raises)


ERRORS = [
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    Panic(),
    StopIteration(),
    OSError(),
]


@pytest.mark.parametrize(
    "place", [fails, in_a_gather, in_a_group, in_a_task_of_a_task, in_a_thread]
)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_is_raised_in_an_event_loop_is_the_functions_error_and_the_loop_goes_on(
    place, error
):
    loops = set()

    async def function(responses):
        loops.add(asyncio.get_running_loop())
        if error is not None:
            await place(error)
        return [1.0] * len(responses)

    if isinstance(error, asyncio.CancelledError) and place is in_a_group:
        pytest.skip("a group of tasks goes on without one that is cancelled")
    began = time.monotonic()
    with pytest.raises(
        FunctionInterruptedError if isinstance(error, KeyboardInterrupt) else FunctionError,
        match="m:f",
    ):
        call_for_list(function, "m:f", ["r"])
    error = None
    assert call_for_list(function, "m:f", ["r"]) == [1.0]
    assert len(loops) == 1
    assert time.monotonic() - began < 5


def close(loop):
    """As from another thread in the moment in which it does not run."""
    loop._closed = True
    loop.stop()


@pytest.mark.parametrize(
    "end",
    [
        lambda loop: loop.call_soon(sys.exit, "enough"),
        lambda loop: loop.call_later(0.01, os._exit, 0),
        lambda loop: threading.Timer(0.01, loop.call_soon_threadsafe, [sys.exit]).start(),
        lambda loop: loop._selector.close(),
        close,
    ],
    ids=["callback", "timer", "thread", "broken", "closed"],
)
def test_an_event_loop_that_ends_is_noticed_at_once_and_the_next_call_has_another(end):
    async def function(responses):
        end(asyncio.get_running_loop())
        await asyncio.get_running_loop().create_future()

    async def good(responses):
        asyncio.get_running_loop().stop()  # which ends nothing
        await asyncio.sleep(0.01)
        return [1.0]

    began = time.monotonic()
    with pytest.raises(FunctionError, match=r"m:f (ended the program|failed in .*)"):
        call_for_list(function, "m:f", ["r"])
    assert call_for_list(good, "m:f", ["r"]) == [1.0]
    assert time.monotonic() - began < 5


def test_a_functions_own_end_of_the_process_is_an_error_and_a_forked_process_ends():
    def function(responses):
        child = os.fork()
        if not child:
            os._exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status)

    before = os._exit
    with pytest.raises(FunctionError, match=r"m:f ended the program \(sys.exit, status 7\)"):
        call_for_list(function, "m:f", ["r"])
    assert os._exit is before


WAITS = """
import asyncio, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
from fastp3o.calls.function import call_for_list
async def function(responses):
    print("waits", flush=True)
    await asyncio.sleep(60)
call_for_list(function, "m:f", ["r"])
"""


def test_an_interrupt_ends_a_wait_at_once():
    settings = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], env=settings, stdout=-1, stderr=-1, text=True
    ) as process:
        assert process.stdout.readline() == "waits\n"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert said.splitlines()[-1].endswith("FunctionInterruptedError: m:f raised KeyboardInterrupt")
    assert time.monotonic() - began < 10


class Inside:
    """A function that works in another folder until it may go on, and goes back."""

    def __init__(self, folder: Path):
        self.folder, self.begun, self.may_end = folder, threading.Event(), threading.Event()
        self.stayed = False
        folder.mkdir()

    def __call__(self, responses):
        before = os.getcwd()
        os.chdir(self.folder)
        self.begun.set()
        assert self.may_end.wait(10)
        self.stayed = os.getcwd() == str(self.folder)
        os.chdir(before)
        return [1.0]


def quiet(responses):
    return [1.0]


@pytest.mark.parametrize("second", ["main", "background", "thread"])
@pytest.mark.parametrize("first", ["background", "thread"])
def test_no_thread_takes_the_working_directory_from_another(tmp_path, first, second):
    """One that changes nothing begins or ends while another is elsewhere."""

    def start(thread, call):
        return (
            Background(call).result
            if thread == "background"
            else ThreadPoolExecutor(1).submit(call)
        )

    def calls_quiet():
        if second == "main":
            return call_for_list(quiet, "m:quiet", ["r"])
        return start(second, lambda: call_for_list(quiet, "m:quiet", ["r"])).result(10)

    before, inside = os.getcwd(), Inside(tmp_path / "sandbox")
    result = start(first, lambda: call_for_list(inside, "m:inside", ["r"]))
    assert inside.begun.wait(10)
    calls_quiet()
    inside.may_end.set()
    assert result.result(10) == [1.0]
    assert inside.stayed
    assert os.getcwd() == before
    # The other ends while a quiet one is under way, which has begun when all was elsewhere.
    inside, ended = Inside(tmp_path / "other"), threading.Event()
    result = start(first, lambda: call_for_list(inside, "m:inside", ["r"]))
    assert inside.begun.wait(10)

    def waits(responses):
        inside.may_end.set()
        result.result(10)
        ended.set()
        return [1.0]

    call = lambda: call_for_list(waits, "m:waits", ["r"])  # noqa: E731
    call() if second == "main" else start(second, call).result(10)
    assert ended.is_set()
    assert os.getcwd() == before
    # What a thread has left behind is put back by the main one.
    careless = start(
        first, lambda: call_for_list(lambda responses: os.chdir(tmp_path) or [1.0], "m:f", ["r"])
    )
    careless.result(10)
    if first == "background":
        time.sleep(0.05)  # until it has released what it held
    assert call_for_list(lambda responses: [float(os.getcwd() == before)], "m:f", ["r"]) == [1.0]
    assert os.getcwd() == before


def test_a_thread_that_is_left_behind_takes_the_directory_from_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr("fastp3o.calls.function.GRACE", 0.1)
    monkeypatch.chdir(tmp_path)
    may_end = threading.Event()
    late = Background(
        lambda: call_for_list(lambda responses: may_end.wait(20), "m:late", ["r"], timeout=0.1)
    )
    with pytest.raises(FunctionError, match=r"m:late has not returned after 0\.1 s"):
        late.result.result(10)
    # The program goes on elsewhere, where users' code is put back to.
    (tmp_path / "later").mkdir()
    os.chdir("later")
    call_for_list(lambda responses: os.chdir("/") or [1.0], "m:careless", ["r"])
    assert Path.cwd() == tmp_path / "later"
    may_end.set()
    late.join(10)
    assert Path.cwd() == tmp_path / "later"


def test_a_limit_in_the_main_thread_is_no_error_of_the_codes_own(monkeypatch):
    from fastp3o.calls.function import raised_by_itself

    # A shell starts what runs in its background with an ignored SIGINT.
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    own = [SystemExit(), GeneratorExit(), asyncio.CancelledError(), Panic(), OSError()]
    assert all(map(raised_by_itself, own))
    assert not raised_by_itself(TookTooLongError(1.0))
    assert not raised_by_itself(KeyboardInterrupt())
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(raised_by_itself, KeyboardInterrupt()).result()
