"""Runs everything that needs a GPU, part by part in order of worth, within a limit of time.

    python -m benchmarks.gpu_parts [FOLDER] [CALL ...] [--only PART[,PART]] [--device gpu|cpu]

Parts belong to calls, of which each fits one loan of a machine: `first` has what is wanted most,
`second` goes on with it on the machine that is still warm, `rest` has the other levels and the
tests.

Each part runs in processes of its own, with their own JSON and log in FOLDER/parts; what all have
measured is merged into FOLDER/kernels.gpu.json after each result. Run again, it goes on: what has
results is not run again, but for the parts named by --only. A process that hangs, crashes or loses
its GPU is ended, its test is recorded so, and a new process goes on with the next. The exit status
is 0 if every part has passed. This module needs no torch.

    FASTP3O_PATIENCE=5    times as long limits, for a slow machine
    FASTP3O_TRIAL=1       sizes and tests that a GPU whose kernels are interpreted has done in minutes
"""

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks import report, results_file

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short")
NO_TESTS = 5  # pytest's exit status where all tests had results already
# The exit statuses of pytest that leave nothing to try.
ENDED = (0, 1, NO_TESTS)
# As `recording.DEVICE_LOST`.
DEVICE_LOST = 75
# Seconds after which what ended is looked for.
LOOK = 0.2
# Seconds of each call, which its parts' limits fill: two of them and a minute and a half to start
# are a quarter of an hour.
CALLS = {"first": 420.0, "second": 400.0, "rest": 470.0}
# A case of every kernel, against fp64.
KERNELS = (
    "tests/kernels/rows/test_token_logprobs.py::test_maxima_far_apart_between_blocks",
    "tests/kernels/rows/test_statistics.py::test_the_gradient_of_the_entropy_alone",
    "tests/kernels/rows/test_token_logprobs.py::test_sequence_logprobs_are_sums_and_differentiable",
    "tests/kernels/p3o/test_losses.py::test_logits_of_scale_100_and_minus_infinity",
    "tests/kernels/p3o/test_linear_p3o_loss.py::test_fp16_gradients_keep_their_digits_whatever_the_size_of_rewards",
    "tests/kernels/head/test_gradient_scaling.py",
    "tests/kernels/decoding/test_attention_kernel.py::test_maxima_far_apart",
    "tests/kernels/layers/test_norm.py::test_more_rows_than_programs_sum_the_gradient_of_a_weight",
    "tests/kernels/layers/test_rotary.py::test_turned_back_by_the_opposite_angles",
    "tests/kernels/layers/test_gate.py::test_far_from_zero",
    "tests/kernels/decoding/test_sampling_kernel.py::test_vocabularies_around_a_tile_layouts_and_maxima_far_apart",
)


class Part(NamedTuple):
    """commands: of its processes, which run at the same time, by name. seconds: limit of all of
    them in one run.

    patience: seconds that one test may take; a process that writes no result for so long is ended.
    least: seconds that a test needs; with less left none begins, and with no room for the first the
    part does not. A command with {results} in its words writes its JSON there.
    """

    name: str
    seconds: float
    commands: dict[str, Sequence[str]]
    patience: float = 60.0
    least: float = 8.0
    call: str = "rest"


def measure(*arguments: str) -> Sequence[str]:
    return (*PYTEST, *arguments, "--benchmark-disable-gc", "--results={results}", "--resume")


def test(*arguments: str) -> Sequence[str]:
    return (*PYTEST, "-p", "benchmarks.recording", *arguments, "--results={results}", "--resume")


def parts(device: str) -> list[Part]:
    """In order of worth. A CPU has the parts whose tests it can run, at small sizes."""
    times = patience()
    body, head = "benchmarks/test_body.py", "benchmarks/test_hidden_level.py"
    mended = "tests/kernels/p3o/test_linear_p3o_loss.py"
    found = [
        Part(
            "smoke",
            45,
            {"smoke": test(*KERNELS, "tests/fastp3o/test_smoke_on_gpu.py")},
            patience=40,
            call="first",
        ),
        Part("body", 125, {"body": measure(body, "-k", "not compiled")}, call="first"),
        Part(
            "iteration",
            170,
            {"iteration": measure("benchmarks/test_iteration.py")},
            patience=170,
            least=100,
            call="first",
        ),
        Part(
            "training",
            80,
            {"training": measure("benchmarks/test_training_run.py")},
            patience=80,
            least=50,
            call="first",
        ),
        Part(
            "compiled",
            100,
            {"compiled": measure(body, "-k", "compiled")},
            patience=90,
            least=20,
            call="second",
        ),
        Part("head", 135, {"head": measure(head)}, call="second"),
        Part(
            "mended",
            30,
            {"mended": test(mended, "-k", "products_of_pytorch")},
            patience=25,
            call="second",
        ),
        Part("packing", 60, {"packing": measure("benchmarks/test_packing.py")}, call="second"),
        Part(
            "rollouts",
            75,
            {"rollouts": measure("benchmarks/test_rollouts.py")},
            patience=75,
            call="second",
        ),
        Part("logits", 45, {"logits": measure("benchmarks/test_logits_level.py")}),
        Part("objectives", 35, {"objectives": measure("benchmarks/test_objectives.py")}),
        Part("tests", 60, gpu_tests(device), patience=50),
    ]
    sanitizer = shutil.which("compute-sanitizer")
    if device == "gpu" and sanitizer:
        found.append(
            Part(
                "sanitizer",
                40,
                {"sanitizer": (sanitizer, "--error-exitcode", "9", *PYTEST, *KERNELS)},
            )
        )
    return [
        part._replace(
            **{limit: times * getattr(part, limit) for limit in ("seconds", "patience", "least")}
        )
        for part in found
    ]


def patience() -> float:
    return float(os.environ.get("FASTP3O_PATIENCE", "1"))


def gpu_tests(device: str) -> dict[str, Sequence[str]]:
    rooms = "tests/kernels"
    if device == "cpu":
        return {"tests-rows": test(f"{rooms}/rows/test_token_logprobs.py")}
    stages = "tests/fastp3o/training/test_online.py"
    if os.environ.get("FASTP3O_TRIAL") == "1":
        return {
            "tests-others": test(f"{rooms}/test_checks.py"),
            "tests-stages": test(stages, "-k", "first_ratio and fp16"),
        }
    others = (
        "test_checks",
        "test_losses",
        "test_response_tokens",
        "test_exposed_head",
        "test_drop_in",
    )
    return {
        **{
            f"tests-{room}": test(f"{rooms}/{room}")
            for room in ("rows", "head", "p3o", "decoding", "layers")
        },
        "tests-others": test(*(f"{rooms}/{name}.py" for name in others)),
        "tests-attention": test("tests/fastp3o/models/test_attention.py", "-m", "gpu"),
        "tests-stages": test(stages, "-k", "half_precision or first_ratio"),
        "tests-engine": test("tests/fastp3o/rollouts/test_engine.py", "-m", "gpu"),
    }


def work_off(
    name: str,
    command: Sequence[str],
    part: Part,
    folder: Path,
    deadline: float,
    stopped: threading.Event,
) -> None:
    """Runs one of a part's commands until its tests have results, in a new process after each one
    that a test ended.
    """
    results, log = (folder / "parts" / f"{name}.{suffix}" for suffix in ("json", "log"))
    has_tests = "{results}" in " ".join(command)
    command = [word.replace("{results}", str(results)) for word in command]
    record = results_file.load(results)
    # That a process failed as a whole is forgotten: it is tried again.
    lists = {key: [test for test in record[key] if test != name] for key in ("finished", "failed")}
    results_file.write(results, record | lists)
    while True:
        known = len(results_file.load(results)["finished"])
        reason, status = ended(command, results, log, part, deadline, stopped)
        with log.open("a") as file:
            print(reason, file=file)
        if reason == results_file.OUT_OF_TIME:
            return
        record = results_file.load(results)
        progress = len(record["finished"]) > known
        passed = status == 0 or (status == NO_TESTS and known > 0)
        complete = status in ENDED or (status is not None and not has_tests)
        if record["running"]:
            record, progress = results_file.end_running(record, reason), True
        elif not passed and not record["failed"] and not progress:
            record |= {"failed": [name]}
        elif not has_tests:
            record |= {"finished": [name]}
        results_file.write(
            results, record | {"complete": complete and not results_file.unbegun(record)}
        )
        if complete or not progress or deadline - time.monotonic() <= part.least:
            return


def ended(
    command: Sequence[str],
    results: Path,
    log: Path,
    part: Part,
    deadline: float,
    stopped: threading.Event,
) -> tuple[str, int | None]:
    """Runs a process to its end. Returns what became of it, and its exit status; None if it was
    killed here, as one is that is out of time or hangs.
    """
    started = time.monotonic()
    seconds = max(deadline - started - part.least, 0.0)
    environment = {**os.environ, "FASTP3O_BENCHMARK_SECONDS": f"{seconds:.1f}"}
    with log.open("a") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    try:
        while (status := process.poll()) is None:
            time.sleep(LOOK)
            if time.monotonic() > deadline or stopped.is_set():
                return results_file.OUT_OF_TIME, None
            if (
                min(time.monotonic() - started, time.time() - results.stat().st_mtime)
                > part.patience
            ):
                return f"failed: no result in {part.patience:.0f} seconds", None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status in ENDED:
        return f"ended with {status}", status
    if status == DEVICE_LOST:
        return "failed: CUDA refused everything after it", status
    return (
        f"failed: the process ended with {signal.Signals(-status).name if status < 0 else status}",
        status,
    )


def die_with_parent() -> None:
    """A process that outlived this one would share the GPU with the next run."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def run_part(part: Part, folder: Path, device: str, deadline: float) -> None:
    deadline = min(deadline, time.monotonic() + part.seconds)
    waiting = {
        name: command
        for name, command in part.commands.items()
        if not record_of(folder, name)["complete"]
    }
    stopped, written = threading.Event(), 0.0
    with ThreadPoolExecutor(len(waiting)) as pool:
        futures = [
            pool.submit(work_off, *one, part, folder, deadline, stopped) for one in waiting.items()
        ]
        try:
            while not all(future.done() for future in futures):
                time.sleep(LOOK)
                # Writing without need would disturb what is measured.
                newest = max(path.stat().st_mtime for path in (folder / "parts").glob("*.json"))
                if newest > written:
                    written = newest
                    merge(folder, device)
        finally:
            stopped.set()
    for future in futures:
        future.result()


def record_of(folder: Path, name: str) -> dict:
    return results_file.load(folder / "parts" / f"{name}.json")


def merge(folder: Path, device: str) -> Path:
    """Writes what all parts have measured as one record."""
    records = (results_file.load(path) for path in sorted((folder / "parts").glob("*.json")))
    path = folder / f"kernels.{device}.json"
    results_file.write(path, results_file.merged(records))
    return path


def run(
    every: list[Part], folder: Path, device: str, seconds: float, only: Sequence[str] = ()
) -> int:
    """Runs the parts that have no results, or those named in `only`, and prints what came of all.
    Returns 0 if these have passed, else 1.
    """
    started = time.monotonic()
    chosen = [part for part in every if part.name in only] if only else every
    for name in (name for part in chosen if only for name in part.commands):
        for suffix in ("json", "log"):
            (folder / "parts" / f"{name}.{suffix}").unlink(missing_ok=True)
    waiting = list(chosen)
    # What a part did not finish in its own time goes on in the time that others left.
    for _ in range(2):
        for part in list(waiting):
            if is_complete(part, folder):
                print(
                    f"{part.name}: has results, which --only {part.name} would measure again",
                    flush=True,
                )
                waiting.remove(part)
                continue
            left = seconds - (time.monotonic() - started)
            if min(left, part.seconds) < part.least:
                continue
            began = time.monotonic()
            run_part(part, folder, device, began + left)
            print(line(part, folder, time.monotonic() - began), flush=True)
            if is_complete(part, folder):
                waiting.remove(part)
    record = report.load(merge(folder, device))
    if record["environment"]:
        print("", report.summary([record]), "", sep="\n")
    print(*(line(part, folder) for part in chosen), sep="\n")
    print(f"{time.monotonic() - started:.0f} s; results in {folder}")
    return int(any(not is_complete(part, folder) or failures(part, folder) for part in chosen))


def is_complete(part: Part, folder: Path) -> bool:
    return all(record_of(folder, name)["complete"] for name in part.commands)


def failures(part: Part, folder: Path) -> list[str]:
    return [test for name in part.commands for test in record_of(folder, name)["failed"]]


def line(part: Part, folder: Path, seconds: float | None = None) -> str:
    """What came of a part, and how many tests ended well (or measured a peer as absent) or found no
    time.
    """
    records, failed = [record_of(folder, name) for name in part.commands], failures(part, folder)
    word = "failed" if failed else "passed" if is_complete(part, folder) else "unfinished"
    text = f"{part.name}: {word}, {sum(len(set(one['finished']) - set(one['failed'])) for one in records)} done"
    left = sum(map(results_file.unbegun, records))
    text += f", {left} left" if left else ""
    text += "" if seconds is None else f", {seconds:.0f} s"
    return text + "".join(f"\n    failed: {test}" for test in failed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=report.RESULTS, help="Of results.")
    parser.add_argument(
        "calls", nargs="*", metavar="CALL", help=f"Of {', '.join(CALLS)}; all by default."
    )
    parser.add_argument("--only", default="", help="Parts to run again, with commas between.")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    arguments = parser.parse_args()
    if unknown := set(arguments.calls) - CALLS.keys():
        parser.error(f"no call {', '.join(sorted(unknown))}; there are {', '.join(CALLS)}")
    calls = arguments.calls or list(CALLS)
    every = [part for part in parts(arguments.device) if part.call in calls]
    only = [name for name in arguments.only.split(",") if name]
    if unknown := set(only) - {part.name for part in every}:
        parser.error(
            f"no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in every)}"
        )
    seconds = patience() * sum(CALLS[call] for call in calls)
    sys.exit(run(every, arguments.folder.resolve(), arguments.device, seconds, only))


if __name__ == "__main__":
    main()
