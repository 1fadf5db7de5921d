"""Errors end in one line or in a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastp3o.errors import UserError
from fastp3o.script import run_script


@pytest.fixture(autouse=True)
def _arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "--updates", "0"])


def fail(error: BaseException) -> None:
    raise error


MEMORY = "error: out of memory; scripts/memory.py shows what a run takes: "
PEER = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:9"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("--updates must be\n at least 1"), "error: --updates must be at least 1"),
        (OSError(2, "No such file or directory", "a"), "error: [Errno 2] No such file or directory: 'a'"),
        (MemoryError(), f"{MEMORY}MemoryError"),
        (torch.OutOfMemoryError("CUDA out of memory."), f"{MEMORY}CUDA out of memory."),
        (RuntimeError(PEER), f"error: another process of this run failed, and its message says why: {PEER}"),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_message_is_one_line(error: BaseException, line: str | int, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        run_script(lambda: fail(error))
    assert stopped.value.code == line
    assert capsys.readouterr().err == ("interrupted\n" if line == 130 else "")


@pytest.mark.parametrize("error", [ValueError("one"), KeyError("a"), AssertionError(), RuntimeError("a shape")])
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
    assert done.stderr.count("cannot write to stdout") == told
