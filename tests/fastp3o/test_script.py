"""Errors end in one line or in a traceback."""

import sys
from pathlib import Path

import pytest

from fastp3o.endpoint import EndpointError
from fastp3o.errors import UserError
from fastp3o.script import run_script
from fastp3o.training.processes import NotFiniteError


def fail(error: Exception) -> None:
    raise error


def chained() -> None:
    try:
        {}["a"]
    except KeyError as error:
        raise UserError("no a") from error


@pytest.fixture(autouse=True)
def _arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "--updates", "0"])


@pytest.mark.parametrize(
    ("main", "line"),
    [
        (lambda: fail(UserError("--updates must be\n at least 1")), "error: --updates must be at least 1"),
        (lambda: fail(NotFiniteError("the loss is NaN")), "error: the loss is NaN"),
        (lambda: fail(EndpointError("http://a does not answer")), "error: http://a does not answer"),
        (chained, "error: no a"),
        (Path("no such file").read_text, "error: [Errno 2] No such file or directory: 'no such file'"),
    ],
)
def test_a_message_is_one_line(main, line):
    with pytest.raises(SystemExit) as stopped:
        run_script(main)
    assert stopped.value.code == line


@pytest.mark.parametrize(
    ("main", "error"),
    [
        (lambda: list(zip([1], [], strict=True)), ValueError),
        (lambda: int("one"), ValueError),
        (lambda: {}["a"], KeyError),
        (lambda: fail(AssertionError("never")), AssertionError),
        (lambda: fail(RuntimeError("a shape of torch's")), RuntimeError),
    ],
)
def test_a_bug_keeps_its_traceback(main, error):
    with pytest.raises(error):
        run_script(main)


def test_debug_leaves_the_traceback_and_is_no_flag_of_the_script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["script", "--debug", "--updates", "0"])
    with pytest.raises(UserError, match="--updates"):
        run_script(lambda: fail(UserError("--updates must be at least 1")))
    assert sys.argv == ["script", "--updates", "0"]


def test_what_ends_well_ends():
    run_script(lambda: None)
