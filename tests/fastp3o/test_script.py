"""Errors end in one line or in a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastp3o.endpoint import EndpointError
from fastp3o.errors import UserError
from fastp3o.processes import NotFiniteError
from fastp3o.script import run_script


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
        (lambda: fail(MemoryError()), "error: out of memory; scripts/memory.py shows what a run takes: MemoryError"),
        (
            lambda: fail(torch.OutOfMemoryError("CUDA out of memory.")),
            "error: out of memory; scripts/memory.py shows what a run takes: CUDA out of memory.",
        ),
        (
            lambda: fail(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:9")),
            "error: another process of this run has ended, and says why: [gloo/transport/tcp/pair.cc:534] Connection "
            "closed by peer [::1]:9",
        ),
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


def interrupted() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        run_script(interrupted)
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


PRINTING = """
import sys
from pathlib import Path
from rich.console import Console
from tqdm import tqdm
from fastp3o.script import run_script

def main():
    for number in range(100):
        print("a line " * 100)
        tqdm.write("another")
        with tqdm.external_write_mode(file=sys.stdout):
            Console().print("a third")
        print("to standard error", file=sys.stderr)
    Path("done").touch()

run_script(main)
"""


@pytest.mark.parametrize("shell", ["| head -c 1", "2>&1 | head -c 1", ">/dev/full", ">/dev/full 2>&1", ">&-", "2>&-"])
def test_output_that_nobody_takes_ends_nothing(tmp_path: Path, shell: str):
    command = f"set -o pipefail; {sys.executable} -c '{PRINTING}' {shell}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, (tmp_path / "done").exists()) == (0, True), done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    told = shell in ("| head -c 1", ">/dev/full")
    assert done.stderr.count("standard output takes no more") == told
