"""Errors end in one line or in a traceback."""

import os
import subprocess
import sys

import pytest
import torch

from fastp3o.errors import UserError
from fastp3o.script import run_script


@pytest.fixture(autouse=True)
def _arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "--updates", "0"])


def fail(error: BaseException) -> None:
    raise error


MEMORY = "error: out of memory; fastp3o memory shows what a run takes: "
PEER = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:9"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("--updates must be\n at least 1"), "error: --updates must be at least 1"),
        (
            OSError(2, "No such file or directory", "a"),
            "error: [Errno 2] No such file or directory: 'a'",
        ),
        (MemoryError(), f"{MEMORY}MemoryError"),
        (torch.OutOfMemoryError("CUDA out of memory."), f"{MEMORY}CUDA out of memory."),
        (
            RuntimeError(PEER),
            f"error: another process of this run failed, and its message says why: {PEER}",
        ),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_message_is_one_line(
    error: BaseException, line: str | int, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stopped:
        run_script(lambda: fail(error))
    assert stopped.value.code == line
    assert capsys.readouterr().err == ("interrupted\n" if line == 130 else "")


@pytest.mark.parametrize(
    "error", [ValueError("one"), KeyError("a"), AssertionError(), RuntimeError("a shape")]
)
def test_a_bug_keeps_its_traceback(error: Exception):
    with pytest.raises(type(error)):
        run_script(lambda: fail(error))


def test_debug_leaves_the_traceback_and_is_no_flag_of_the_script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["script", "--debug", "--updates", "0"])
    with pytest.raises(UserError, match="--updates"):
        run_script(lambda: fail(UserError("--updates must be at least 1")))
    assert sys.argv == ["script", "--updates", "0"]
    run_script(lambda: None)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


PRINTING = """
import sys
from fastp3o.script import run_script

def main():
    for number in range(1000):
        print("a line " * 100, "\\N{TOP HAT}")
    print("done", file=sys.stderr)

run_script(main)
"""


def printed(shell: str, **settings: str) -> tuple[int, str]:
    """The exit status and the standard error of a script that prints 700 kB."""
    command = ["bash", "-c", f"set -o pipefail; {sys.executable} -c '{PRINTING}' {shell}"]
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def test_output_that_nobody_takes_ends_the_program_in_one_line():
    assert printed("| head -c 1") == (1, "error: [Errno 32] Broken pipe\n")


def test_a_character_that_the_terminal_lacks_ends_nothing():
    assert printed("> /dev/null", PYTHONIOENCODING="latin-1") == (0, "done\n")
