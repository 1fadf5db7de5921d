"""Every kernel compiles ahead of time, at real vocabularies, and spills at most two registers."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastp3o_kernels

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "compile_kernels.py"
FILES = sorted(Path(fastp3o_kernels.__file__).parent.rglob("*_kernel.py"))
ENVIRONMENT = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT / "kernels")}


def python(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env=ENVIRONMENT, cwd=SCRIPT.parent, capture_output=True, text=True, timeout=500
    )


def check_instructions(table: list[dict]) -> None:
    """16-byte loads wherever rows begin at such addresses and are streamed; tensor cores for keys
    of half precision.
    """
    for entry in table:
        half, odd = "fp32" not in entry["configuration"], entry["configuration"].endswith("V 50257")
        by_rows = ("logprobs_kernel", "dlogits_kernel", "statistics_kernel", "exponentials_kernel")
        streamed = entry["kernel"] in by_rows and not (half and odd)
        assert entry["wide_loads"] or not (streamed or entry["kernel"] == "race_kernel"), entry
        assert entry["tensor_core"] or not (
            half and entry["kernel"] == "partial_attention_kernel"
        ), entry


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--sample"], marks=pytest.mark.nightly),
        pytest.param([], marks=pytest.mark.compiled),
    ],
    ids=["every branch of every kernel", "all configurations"],
)
def test_kernels_compile_for_hopper(tmp_path, options):
    chosen = "--vocabularies", 50257, "--architectures", 90, *options
    done = python(SCRIPT, *chosen, "--output", tmp_path / "table.json")
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((tmp_path / "table.json").read_text())["kernels"]
    sources = [file.read_text() for file in FILES]
    defined = {
        name
        for source in sources
        for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)
    }
    assert {entry["kernel"] for entry in table} == defined
    check_instructions(table)


ENTRIES = [
    {
        "kernel": "k",
        "configuration": "c",
        "architecture": "sm_80",
        "stack": 0,
        "spills": 0,
        "shared": 0,
    }
    | fault
    for fault in ({}, {"stack": 16, "spills": 4}, {"shared": 200 * 1024})
]


def test_the_committed_table_is_of_these_kernels_and_complete_and_has_no_failure():
    """All architectures and vocabularies take minutes, so they are compiled when a kernel changes."""
    table = json.loads((ROOT / "benchmarks" / "results" / "compiled_kernels.json").read_text())
    expected = python(
        "-c",
        "import json, compile_kernels as c; print(json.dumps([c.sources(), "
        "[[k.kernel, k.name, f'sm_{a}'] for a in c.ARCHITECTURES for k in c.configurations(c.VOCABULARIES)], "
        "[c.failures(t) for t in (json.load(open('results/compiled_kernels.json'))['kernels'], "
        f"*zip({ENTRIES}))]]))",
    )
    sources, configurations, (failed, *failures) = json.loads(expected.stdout.splitlines()[-1])
    assert [failed, *map(len, failures)] == [[], 0, 1, 1]
    assert "16 bytes of stack, 4 spills" in failures[1][0]
    assert f"{200 * 1024} bytes of shared memory" in failures[2][0]
    hint = "run: python benchmarks/compile_kernels.py --output benchmarks/results/compiled_kernels.json"
    assert table["sources"] == sources, hint
    assert [
        [e["kernel"], e["configuration"], e["architecture"]] for e in table["kernels"]
    ] == configurations, hint
    check_instructions(table["kernels"])


def test_products_say_their_precision_and_nothing_is_tuned():
    """tl.dot rounds fp32 to tf32 unless it is told not to; tuning would compile and time dozens of
    kernels in a run.
    """
    products = 0
    for file in FILES:
        calls = [
            node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)
        ]
        for call in calls:
            name = ast.unparse(call.func)
            assert "autotune" not in name, file
            if name == "tl.dot":
                products += 1
                assert "input_precision" in [keyword.arg for keyword in call.keywords], (
                    file,
                    call.lineno,
                )
    assert products
