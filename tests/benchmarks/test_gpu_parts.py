"""The parts of a run on a GPU, with small scripts in place of tests: order, failures, hangs, kills,
resumption.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_parts, results_file
from benchmarks.gpu_parts import Part

ROOT = Path(__file__).parents[2]
# Measures two peers and one of ours, as `recording.py` files them: {results} is its JSON.
SUITE = """
import json, os, pathlib, signal, sys, time
sys.path.insert(0, {root!r})
from benchmarks import results_file
path = pathlib.Path({results!r})
record = results_file.without_the_unbegun(results_file.load(path))
record["environment"] = {{"device": "a GPU", "cuda": "13", "packages": {{}}, "date": "today"}}
tests = [("benchmarks/test_x.py::test_" + word.partition("=")[0], word.partition("=")[2]) for word in sys.argv[1:]]
for test, what in sorted(tests, key=lambda one: one[0] in record["late"]):
    if test in record["finished"]:
        continue
    record["running"] = test
    results_file.write(path, record)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "lose":
        os._exit(75)
    if what == "hang":
        time.sleep(60)
    record["finished"].append(test)
    record["running"] = None
    record["benchmarks"].append({{"level": "smoke", "implementation": test.rpartition("_")[2]}})
    results_file.write(path, record)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(gpu_parts, "LOOK", 0.02)


def suite(tmp_path: Path, name: str, *tests: str, **settings) -> Part:
    """A part of tests, each a name or name=what it does."""
    script = tmp_path / f"{name}.py"
    script.write_text(
        SUITE.format(root=str(ROOT), results=str(tmp_path / "out" / "parts" / f"{name}.json"))
    )
    # The word stands for a file that the script knows already.
    command = [sys.executable, "-S", str(script), *tests]
    return Part(
        name, 20, {name: ["env", "RESULTS={results}", *command]}, **{"least": 0.0} | settings
    )


def shell(name: str, script: str, seconds: float = 20) -> Part:
    return Part(name, seconds, {name: ["sh", "-c", script]}, least=0.0)


def run(parts: list[Part], tmp_path: Path, seconds: float = 30, only=()) -> int:
    return gpu_parts.run(parts, tmp_path / "out", "gpu", seconds, only)


def test_parts_run_in_order_and_one_that_fails_stops_no_other(tmp_path, capsys):
    order = tmp_path / "order"
    parts = [
        shell(name, f"echo {name} >> {order}; {end}")
        for name, end in (("a", ""), ("b", "exit 1"), ("c", ""))
    ]
    assert run(parts, tmp_path) == 1
    assert order.read_text() == "a\nb\nc\n"
    printed = capsys.readouterr().out
    assert "a: passed, 1 done" in printed
    assert "b: failed, 0 done" in printed
    assert run([parts[0], parts[2]], tmp_path) == 0
    assert run(parts, tmp_path, only=["a"]) == 0
    assert order.read_text() == "a\nb\nc\na\n", "what has results runs again only if it is named"


def test_what_a_peer_breaks_is_recorded_and_the_rest_goes_on_in_new_processes_and_in_the_next_run(
    tmp_path, capsys
):
    tests = ["fastp3o", "crashing_peer=kill", "losing_peer=lose", "slow_peer=hang", "peer"]
    slow, head = (
        shell("slow", "sleep 60", seconds=0.3),
        suite(tmp_path, "head", *tests, patience=1.5),
    )
    assert run([slow, head], tmp_path, seconds=20) == 1
    assert "slow: unfinished, 0 done" in capsys.readouterr().out
    assert run([shell("slow", "true"), head], tmp_path) == 0
    found = json.loads((tmp_path / "out" / "kernels.gpu.json").read_text())
    assert [result["implementation"] for result in found["benchmarks"]] == ["fastp3o", "peer"]
    assert {one["name"]: one["reason"] for one in found["not_measured"]} == {
        "test_crashing_peer": "failed: the process ended with SIGSEGV",
        "test_losing_peer": "failed: CUDA refused everything after it",
        "test_slow_peer": "failed: no result in 2 seconds",
    }
    assert run([suite(tmp_path, "ours", "fastp3o=kill", "peer")], tmp_path) == 1, (
        "our own failure fails the run"
    )


def test_a_test_that_the_deadline_ends_comes_last_the_next_time(tmp_path):
    part = suite(tmp_path, "head", "fastp3o", "slow=hang", "peer")._replace(seconds=0.8)
    assert [run([part], tmp_path, seconds=0.8) for _ in range(2)] == [1, 1]
    found = json.loads((tmp_path / "out" / "kernels.gpu.json").read_text())
    assert [result["implementation"] for result in found["benchmarks"]] == ["fastp3o", "peer"]


def test_the_record_has_how_many_tests_passed_and_which_failed():
    tests = {
        "finished": [
            "tests/a.py::test_a",
            "tests/a.py::test_b",
            "tests/a.py::test_skipped",
            "benchmarks/b.py::c",
        ]
    }
    tests |= {"failed": ["tests/a.py::test_b"], "skipped": ["tests/a.py::test_skipped"]}
    others = {"finished": ["sanitizer", "tests/c.py::test_c"], "failed": ["sanitizer"]}
    record = results_file.merged(results_file.empty() | part for part in (tests, others))
    assert record["tests"] == {"passed": 2, "failed": ["tests/a.py::test_b", "sanitizer"]}


def test_a_part_whose_first_test_has_no_room_is_not_begun(tmp_path, capsys):
    """Neither at its turn nor in the time that others leave."""
    began = tmp_path / "began"
    waits, slow = shell("waits", "sleep 0.5"), shell("slow", f"touch {began}")._replace(least=4.8)
    assert run([waits, slow], tmp_path, seconds=5) == 1
    assert not began.exists()
    assert "slow: unfinished, 0 done" in capsys.readouterr().out
    assert run([waits, slow], tmp_path, seconds=5) == 0, "with the first one done it has room"


def test_a_test_that_has_no_room_is_not_begun_in_a_part_that_goes_on(tmp_path):
    """What the process is told leaves as much time as one test needs."""
    told = tmp_path / "told"
    part = shell("slow", f"echo $FASTP3O_BENCHMARK_SECONDS > {told}", seconds=20)._replace(
        least=12.0
    )
    assert run([part], tmp_path, seconds=15) == 0
    assert 2 < float(told.read_text()) <= 3


def test_the_limits_of_a_calls_parts_fill_its_time_and_each_part_has_room_for_its_first_test():
    """`first` and `second` on a warm machine leave a minute and a half of a quarter of an hour to
    start.
    """
    assert gpu_parts.CALLS["first"] + gpu_parts.CALLS["second"] <= 820
    for call, seconds in gpu_parts.CALLS.items():
        chosen = [part for part in gpu_parts.parts("gpu") if part.call == call]
        assert sum(part.seconds for part in chosen) <= seconds
        for part in chosen:
            assert part.least < part.seconds
    names = [part.name for part in gpu_parts.parts("gpu")]
    assert names[:4] == ["smoke", "body", "iteration", "training"]


def test_packing_measures_what_its_goals_are_about_first():
    """K 2 at the first lengths, in the layouts that the goals compare, before anything else."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "benchmarks/test_packing.py",
        "-p",
        "no:xdist",
    ]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ids = [line.partition("::")[2] for line in listed.splitlines() if "::" in line]
    first = "test_training[350-40-2-"
    layouts = (
        "fastp3o_shared_prompts",
        "padded",
        "fastp3o_plain_packing",
        "fastp3o_a_response_at_a_time",
    )
    assert ids[:4] == [f"{first}{layout}]" for layout in layouts]
    assert all("350-40-4-" in name for name in ids[4:6])


def test_parts_name_files_that_exist():
    for device in ("gpu", "cpu"):
        for part in gpu_parts.parts(device):
            for command in part.commands.values():
                for word in filter(
                    lambda word: word.startswith(("benchmarks/", "tests/")), command
                ):
                    path, _, name = word.partition("::")
                    assert (
                        f"def {name}(" in (ROOT / path).read_text()
                        if name
                        else (ROOT / path).exists()
                    ), word


def gpu_run(tmp_path, *arguments, **more) -> subprocess.Popen:
    """run_gpu.sh on a CPU."""
    (tmp_path / "kept").mkdir()
    environment = os.environ | {"FASTP3O_PYTHON": sys.executable, "FASTP3O_DEVICE": "cpu"}
    environment |= {"OUT": str(tmp_path / "kept"), "PYTEST_ADDOPTS": "-n 0"}
    command = ["bash", "benchmarks/run_gpu.sh", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more
    )


def test_a_call_is_no_folder(tmp_path):
    ran = gpu_run(tmp_path, "second", "--only", "smoke")
    assert (
        "no part smoke; there are compiled, head, mended, packing, rollouts"
        in ran.communicate()[0].decode()
    )
    assert ran.returncode == 2


def test_a_run_that_is_ended_from_outside_leaves_what_it_has(tmp_path):
    part = tmp_path / "results" / "parts" / "logits.json"
    ran = gpu_run(tmp_path, str(tmp_path / "results"), "--only", "logits")
    until = time.monotonic() + 300
    while (
        not (part.exists() and json.loads(part.read_text())["benchmarks"])
        and time.monotonic() < until
    ):
        time.sleep(0.1)
    time.sleep(0.5)
    ran.terminate()
    ran.communicate(timeout=30)
    assert ran.returncode == 143
    assert json.loads((tmp_path / "kept" / "kernels.cpu.json").read_text())["benchmarks"]
    assert (tmp_path / "kept" / "parts.tar.gz").exists()
