"""Runs everything that needs a GPU, part by part in order of worth, within a limit of time.

    python -m benchmarks.gpu_parts [FOLDER] [--only PART[,PART]] [--seconds 480] [--device gpu|cpu]

Each part runs in processes of its own, with their own JSON and log in FOLDER/parts; what all have measured is merged
into FOLDER/kernels.gpu.json after each result. Run again, it goes on: what has results is not run again, but for the
parts named by --only. A process that hangs, crashes or loses its GPU is ended, its test is recorded so, and a new
process goes on with the next. The exit status is 0 if every part has passed. This module needs no torch.

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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import report, results_file

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short")
# The exit statuses of pytest that leave nothing to try: all passed, some failed, there was no test.
NO_TESTS = 5
ENDED = (0, 1, NO_TESTS)
# As `recording.DEVICE_LOST`.
DEVICE_LOST = 75
# Seconds before its limit after which a process begins no test, and after which what ended is looked for.
MARGIN, LOOK = 8.0, 0.2


class Part(NamedTuple):
    """commands: of its processes, which run at the same time, by name. seconds: limit of all of them in one run.

    patience: seconds that one test may take; a process that writes no result for so long is ended. A command with
    {results} in its words writes its JSON there.
    """

    name: str
    seconds: float
    commands: dict[str, Sequence[str]]
    patience: float = 60.0


def measure(*arguments: str) -> Sequence[str]:
    return (*PYTEST, *arguments, "--benchmark-disable-gc", "--results={results}", "--resume")


def test(*arguments: str) -> Sequence[str]:
    return (*PYTEST, "-p", "benchmarks.recording", *arguments, "--results={results}", "--resume")


def parts(device: str) -> list[Part]:
    """In order of worth. A CPU has the parts whose tests it can run, at small sizes."""
    times = patience()
    found = [
        Part("smoke", 60, {"smoke": test("tests/fastp3o/test_smoke_on_gpu.py")}, patience=40),
        Part("head", 110, {"head": measure("benchmarks/test_hidden_level.py", "benchmarks/test_precision.py")}),
        Part("rollouts", 80, {"rollouts": measure("benchmarks/test_rollouts.py")}, patience=75),
        Part("logits", 45, {"logits": measure("benchmarks/test_logits_level.py")}),
        Part("packing", 35, {"packing": measure("benchmarks/test_packing.py")}),
        Part("iteration", 45, {"iteration": measure("benchmarks/test_iteration.py")}),
        Part("objectives", 35, {"objectives": measure("benchmarks/test_objectives.py")}),
        Part("tests", 60, gpu_tests(device), patience=50),
    ]
    sanitizer = shutil.which("compute-sanitizer")
    if device == "gpu" and sanitizer:
        small_case = (sanitizer, "--error-exitcode", "9", sys.executable, "-m", "benchmarks.small_case")
        found.append(Part("sanitizer", 40, {"sanitizer": small_case}))
    return [part._replace(seconds=times * part.seconds, patience=times * part.patience) for part in found]


def patience() -> float:
    return float(os.environ.get("FASTP3O_PATIENCE", "1"))


def gpu_tests(device: str) -> dict[str, Sequence[str]]:
    rooms = "tests/kernels"
    if device == "cpu":
        return {"tests-rows": test(f"{rooms}/rows/test_token_logprobs.py")}
    if os.environ.get("FASTP3O_TRIAL") == "1":
        return {
            "tests-others": test(f"{rooms}/test_checks.py"),
            "tests-stages": test("tests/fastp3o/training/test_online.py", "-k", "first_ratio and fp16"),
        }
    others = (f"{rooms}/test_checks.py", f"{rooms}/test_losses.py", f"{rooms}/test_response_tokens.py")
    trainer = ("tests/fastp3o/models/test_attention.py", "tests/fastp3o/models/test_reference.py")
    stages = "tests/fastp3o/training/test_online.py"
    return {
        **{f"tests-{room}": test(f"{rooms}/{room}") for room in ("rows", "head", "p3o", "decoding")},
        "tests-others": test(*others, f"{rooms}/test_exposed_head.py", f"{rooms}/test_drop_in.py"),
        "tests-attention": test(*trainer, "-m", "gpu"),
        "tests-stages": test(stages, "-k", "half_precision or first_ratio"),
        "tests-engine": test("tests/fastp3o/rollouts/test_engine_on_gpu.py"),
    }


class Process:
    """One of a part's processes, and those that go on after it where a test ended it."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, patience: float, deadline: float):
        self.name, self.has_tests = name, "{results}" in " ".join(command)
        self.results, self.log = (folder / "parts" / f"{name}.{suffix}" for suffix in ("json", "log"))
        self.command = [word.replace("{results}", str(self.results)) for word in command]
        self.patience, self.deadline = patience, deadline
        # That a process failed as a whole is forgotten: it is tried again.
        record = results_file.load(self.results)
        lists = {key: [test for test in record[key] if test != name] for key in ("finished", "failed")}
        results_file.write(self.results, record | lists)
        self.start()

    def start(self) -> None:
        self.started, self.known = time.monotonic(), len(results_file.load(self.results)["finished"])
        seconds = max(self.deadline - self.started - MARGIN, 0.0)
        with self.log.open("a") as log:
            self.popen = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "FASTP3O_BENCHMARK_SECONDS": f"{seconds:.1f}"},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def look(self) -> bool:
        """Whether nothing is left to wait for. Ends a process that is out of time or hangs, and starts another after
        one that a test ended.
        """
        status, now = self.popen.poll(), time.monotonic()
        if status in ENDED or (status is not None and not self.has_tests):
            # No test is left where all had results already.
            self.settle(ending(status), complete=True, passed=status == 0 or (status == NO_TESTS and self.known > 0))
        elif status is not None:
            self.settle(ending(status))
            return not self.goes_on()
        elif now > self.deadline:
            self.kill()
            with self.log.open("a") as log:
                print(results_file.OUT_OF_TIME, file=log)
        elif now - self.last_result() > self.patience:
            self.kill()
            self.settle(f"failed: no result in {self.patience:.0f} seconds")
            return not self.goes_on()
        else:
            return False
        return True

    def goes_on(self) -> bool:
        """Starts another process if this one got anywhere and there is time."""
        progress = len(results_file.load(self.results)["finished"]) > self.known
        if progress and self.deadline - time.monotonic() > MARGIN:
            self.start()
            return True
        return False

    def last_result(self) -> float:
        """When the process began, or has written a result since."""
        age = time.time() - self.results.stat().st_mtime
        return max(self.started, time.monotonic() - age)

    def settle(self, reason: str, *, complete: bool = False, passed: bool = False) -> None:
        """Writes what became of the process: of the test that it was in, or of itself where it has none."""
        with self.log.open("a") as log:
            print(reason, file=log)
        record = results_file.load(self.results)
        if record["running"]:
            record = results_file.end_running(record, reason)
        elif not passed and not record["failed"] and len(record["finished"]) == self.known:
            record |= {"failed": [self.name]}
        elif not self.has_tests:
            record |= {"finished": [self.name]}
        complete = complete and not results_file.unbegun(record)
        results_file.write(self.results, record | {"complete": complete})

    def kill(self) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


def die_with_parent() -> None:
    """A process that outlived this one would share the GPU with the next run."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def ending(status: int) -> str:
    if status in ENDED:
        return f"ended with {status}"
    if status == DEVICE_LOST:
        return "failed: CUDA refused everything after it"
    return f"failed: the process ended with {signal.Signals(-status).name if status < 0 else status}"


class State(NamedTuple):
    """passed: tests that ended well or measured a peer as absent. left: tests that time was too short for."""

    passed: int
    failed: list[str]
    left: int
    complete: bool

    @property
    def word(self) -> str:
        if self.failed:
            return "failed"
        return "passed" if self.complete else "unfinished"


def state_of(part: Part, folder: Path) -> State:
    records = [results_file.load(folder / "parts" / f"{name}.json") for name in part.commands]
    failed = [test for record in records for test in record["failed"]]
    return State(
        passed=sum(len(set(record["finished"]) - set(record["failed"])) for record in records),
        failed=failed,
        left=sum(map(results_file.unbegun, records)),
        complete=all(record["complete"] for record in records),
    )


def run_part(part: Part, folder: Path, device: str, deadline: float) -> None:
    deadline = min(deadline, time.monotonic() + part.seconds)
    running: list[Process] = []
    written = 0.0
    try:
        for name, command in part.commands.items():
            if not results_file.load(folder / "parts" / f"{name}.json")["complete"]:
                running.append(Process(name, command, folder, part.patience, deadline))
        while running:
            time.sleep(LOOK)
            running = [process for process in running if not process.look()]
            newest = max((path.stat().st_mtime for path in (folder / "parts").glob("*.json")), default=0.0)
            if newest > written:
                written = newest
                merge(folder, device)
    finally:
        for process in running:
            process.kill()


def merge(folder: Path, device: str) -> Path:
    """Writes what all parts have measured as one record."""
    records = (results_file.load(path) for path in sorted((folder / "parts").glob("*.json")))
    path = folder / f"kernels.{device}.json"
    results_file.write(path, results_file.merged(records))
    return path


def forget(part: Part, folder: Path) -> None:
    for name in part.commands:
        for suffix in ("json", "log"):
            (folder / "parts" / f"{name}.{suffix}").unlink(missing_ok=True)


def run(every: list[Part], folder: Path, device: str, seconds: float, only: Sequence[str] = ()) -> int:
    """Runs the parts that have no results, or those named in `only`, and prints what came of all. Returns 0 if these
    have passed, else 1.
    """
    started = time.monotonic()
    chosen = [part for part in every if part.name in only] if only else every
    for part in chosen if only else []:
        forget(part, folder)
    waiting = list(chosen)
    # What a part did not finish in its own time goes on in the time that others left.
    for _ in range(2):
        for part in list(waiting):
            if state_of(part, folder).complete:
                print(f"{part.name}: has results, which --only {part.name} would measure again", flush=True)
                waiting.remove(part)
                continue
            left = seconds - (time.monotonic() - started)
            if left < MARGIN:
                continue
            began = time.monotonic()
            run_part(part, folder, device, began + left)
            print(line(part, folder, time.monotonic() - began), flush=True)
            if state_of(part, folder).complete:
                waiting.remove(part)
    record = report.load(merge(folder, device))
    if record["environment"]:
        print("", report.summary([record]), "", sep="\n")
    print(*(line(part, folder) for part in chosen), sep="\n")
    print(f"{time.monotonic() - started:.0f} s; results in {folder}")
    return int(any(state_of(part, folder).word != "passed" for part in chosen))


def line(part: Part, folder: Path, seconds: float | None = None) -> str:
    state = state_of(part, folder)
    text = f"{part.name}: {state.word}, {state.passed} done"
    text += f", {state.left} left" if state.left else ""
    text += "" if seconds is None else f", {seconds:.0f} s"
    return text + "".join(f"\n    failed: {test}" for test in state.failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=report.RESULTS, help="Of results.")
    parser.add_argument("--only", default="", help="Parts to run again, with commas between.")
    parser.add_argument("--seconds", type=float, default=470.0, help="Limit of the whole run.")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    arguments = parser.parse_args()
    every = parts(arguments.device)
    only = [name for name in arguments.only.split(",") if name]
    if unknown := set(only) - {part.name for part in every}:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in every)}")
    sys.exit(run(every, arguments.folder.resolve(), arguments.device, patience() * arguments.seconds, only))


if __name__ == "__main__":
    main()
