"""What a package and `--help` import: a set of modules rather than seconds, which depend on the
machine.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastp3o.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
# Packages that take a tenth of a second or more.
HEAVY = {
    "accelerate",
    "datasets",
    "httpx",
    "matplotlib",
    "pandas",
    "peft",
    "pyarrow",
    "torch",
    "transformers",
}
PROGRAM = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])  # as `python FILE` does
try:
    if sys.argv[0] == "fastp3o" and len(sys.argv) > 1:
        import fastp3o.__main__
        fastp3o.__main__.main()
    else:
        runpy.run_path(sys.argv[0], run_name="__main__") if len(sys.argv) > 1 else __import__(sys.argv[0])
except SystemExit as end:
    assert end.code in (None, 0), end.code
print(*sorted(sys.modules), file=sys.stderr)
"""


STARTS = {"import fastp3o": ["fastp3o"]} | {
    f"fastp3o {name}": ["fastp3o", name, "--help"] for name in COMMANDS
}
STARTS |= {
    path.name: [f"scripts/{path.name}", "--help"]
    for path in sorted((ROOT / "scripts").glob("*.py"))
}


@pytest.mark.parametrize("start", STARTS)
def test_it_imports_nothing_that_takes_long(start: str):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-c", PROGRAM, *STARTS[start]]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    modules = set(run.stderr.split())
    assert "runpy" in modules
    assert not HEAVY & modules
