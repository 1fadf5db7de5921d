"""What ends in one line, and what in a traceback."""

import sys
import types
from collections.abc import Callable

import pytest

from fastp3o.script import run_script

OURS = """
def value(): raise ValueError("--updates must be\\n at least 1")
def run_time(): raise RuntimeError("the loss is NaN")
def chained():
    try: {}["a"]
    except KeyError as error: raise ValueError("no a") from error
def strict_zip(): list(zip([1], [], strict=True))
def number(): int("one")
def missing(): {}["a"]
def held(): assert False, "never"
def file(): open("no such file")
"""


def function(name: str, package: str) -> Callable[[], None]:
    module = types.ModuleType(f"{package}.made_up")
    exec(OURS, module.__dict__)
    return vars(module)[name]


@pytest.fixture(autouse=True)
def _arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "--updates", "0"])


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("value", "error: --updates must be at least 1"),
        ("run_time", "error: the loss is NaN"),
        ("chained", "error: no a"),
        ("file", "error: [Errno 2] No such file or directory: 'no such file'"),
    ],
)
def test_a_message_is_one_line(name: str, line: str):
    with pytest.raises(SystemExit) as stopped:
        run_script(function(name, "fastp3o"))
    assert stopped.value.code == line


@pytest.mark.parametrize("name", ["strict_zip", "number", "missing", "held"])
def test_a_bug_keeps_its_traceback(name: str):
    with pytest.raises((ValueError, KeyError, AssertionError)):
        run_script(function(name, "fastp3o"))


def test_an_error_of_another_package_keeps_its_traceback():
    with pytest.raises(ValueError, match="--updates"):
        run_script(function("value", "torch"))


def test_debug_leaves_the_traceback_and_is_no_flag_of_the_script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["script", "--debug", "--updates", "0"])
    with pytest.raises(ValueError, match="--updates"):
        run_script(function("value", "fastp3o"))
    assert sys.argv == ["script", "--updates", "0"]


def test_what_ends_well_ends():
    run_script(lambda: None)
