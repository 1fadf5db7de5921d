"""What `--help` imports: a set of modules rather than seconds, which depend on the machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# One of each kind of command.
SCRIPTS = ("memory.py", "online.py", "sft.py", "win_rate.py")
# Packages that take a tenth of a second or more.
HEAVY = {"accelerate", "datasets", "httpx", "matplotlib", "pandas", "peft", "pyarrow", "torch", "transformers"}
# An objective's configuration stands beside its loss, whose file needs torch.
WITH_LOSSES = {"online.py"}

PROGRAM = """
import runpy, sys
sys.argv = sys.argv[1:]
if len(sys.argv) == 1:
    __import__(sys.argv[0])
else:
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert end.code in (None, 0), end.code
print(*sorted(sys.modules), file=sys.stderr)
"""


def imported_by(*arguments: str) -> set[str]:
    """The modules that a script imports with these arguments, or that importing a package does."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(run.stderr.split())


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_imports_nothing_that_takes_long(script: str):
    modules = imported_by(f"scripts/{script}", "--help")
    assert "argparse" in modules
    assert HEAVY & modules == ({"torch"} if script in WITH_LOSSES else set())
    assert "torch._dynamo" not in modules


def test_importing_the_package_imports_nothing_that_takes_long():
    modules = imported_by("fastp3o")
    assert "fastp3o" in modules
    assert not HEAVY & modules
