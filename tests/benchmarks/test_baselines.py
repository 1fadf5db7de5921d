"""A baseline of somebody else: rows as they are measured, names that can be typed, a table after
Ctrl-C.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "README.md"
STOPS = """

def stops(inputs):
    raise KeyboardInterrupt


peers.HIDDEN["stops"] = stops
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    paths = [
        str(folder),
        str(ROOT),
        str(ROOT / "kernels"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        "--color=no",
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_page_s_baseline_has_a_row_as_it_is_measured_and_a_table_after_an_interrupt(
    tmp_path: Path,
):
    section = PAGE.read_text().partition("## Add your baseline")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "mine.py").write_text(code + STOPS)
    results = tmp_path / "results.json"
    chosen = "test_forward_and_backward and 512-D256-V8192 and float32 and (mine or stops)"
    done = run(
        tmp_path,
        "benchmarks/test_hidden_level.py",
        "-p",
        "mine",
        "-k",
        chosen,
        f"--results={results}",
    )
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout + done.stderr
    row = r"test_forward_and_backward\[512-D256-V8192-mine-float32\]: [\d.]+ ms, [\d.]+ x bare, .* loss_error \S+"
    assert re.search(row, done.stdout), done.stdout
    table = done.stdout.partition("Measured on:")[2]
    assert re.search(r"^256, 8192 +512 +mine +[\d.]+ ", table, re.MULTILINE), done.stdout
    (result,) = json.loads(results.read_text())["benchmarks"]
    assert result["implementation"] == "mine"
    assert result["dhidden_error"] < 5e-3


def test_ids_can_be_typed():
    listed = run(ROOT, "benchmarks", "--collect-only", "-q").stdout
    ids = [line.partition("::")[2] for line in listed.splitlines() if "::" in line]
    assert len(ids) > 100, listed
    assert not [name for name in ids if not re.fullmatch(r"\w+(\[[\w.-]+\])?", name)]
