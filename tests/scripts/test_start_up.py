"""What a package and `--help` import: a set of modules rather than seconds, which depend on the machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Packages that take a tenth of a second or more.
HEAVY = {"accelerate", "datasets", "httpx", "matplotlib", "pandas", "peft", "pyarrow", "torch", "transformers"}
PROGRAM = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__") if len(sys.argv) > 1 else __import__(sys.argv[0])
except SystemExit as end:
    assert end.code in (None, 0), end.code
print(*sorted(sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize("name", ["fastp3o", *sorted(path.name for path in (ROOT / "scripts").glob("*.py"))])
def test_it_imports_nothing_that_takes_long(name: str):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-c", PROGRAM, *([name] if name == "fastp3o" else [f"scripts/{name}", "--help"])]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    modules = set(run.stderr.split())
    assert "runpy" in modules
    assert not HEAVY & modules
