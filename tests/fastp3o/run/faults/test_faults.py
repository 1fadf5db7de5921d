"""Whatever stops a run of one or two processes, and wherever: `--resume` ends with the bits of a
run that was not stopped. Where one of two processes has the fault, the other ends too, and says
why.

A sample of each fault is part of the suite; `-m "faults or not faults"` tries all of them, and ends
with the table of benchmarks/README.md. FASTP3O_KILLS: random kills and signals of each run.
"""

import itertools
import os
import random
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fastp3o.calls.function import FunctionError
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.rewards.function import FunctionReward
from tests.fastp3o.run.faults.injection import DAMAGES, KILLED, LONGEST, fork, wait_together
from tests.fastp3o.run.faults.scenes import COUNTS, SCENES, Scene
from tests.fastp3o.torchrun import torchrun

MakeScene = Callable[..., Scene]

# The processes of a run, and the one with the fault.
PLACES = {"alone": (1, 0), "main": (2, 0), "other": (2, 1)}
# The first call with a fault in the suite, and how many lie between two.
SAMPLES = {"alone": (7, 50), "main": (99, 200), "other": (2, 40)}
FAULTS = [
    *(("killed", resumes, place) for resumes in (False, True) for place in PLACES),
    *(
        ("power lost: what is not synced is lost by half,", resumes, "alone")
        for resumes in (False, True)
    ),
    *(("disk full", False, place) for place in PLACES),
    *(("SIGTERM", False, place) for place in ("main", "other")),
]
# None: the sample of the suite.
PARTS = [None, *(pytest.param(part, marks=pytest.mark.faults) for part in range(8))]
TRIES = os.environ.get("FASTP3O_KILLS")
at_night = pytest.mark.faults


@pytest.fixture
def scene(workplace: Path, tiny_model: str) -> MakeScene:
    """scene(name="SFT", processes=1)"""
    return lambda name="SFT", processes=1: Scene(name, tiny_model, workplace, processes)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("fault", "resumes", "place"), FAULTS)
def test_a_fault_before_a_file_system_call(
    scene: MakeScene, fault: str, resumes: bool, place: str, part
):
    processes, process = PLACES[place]
    run = scene(processes=processes)
    work, total = run.train, run.calls[process]
    stopped = None
    if resumes:
        stopped, work = run.stopped_with_a_state(), run.resume
        shutil.copytree(stopped, run.run)
        total = run.count_calls(work)[process]
    first, step = SAMPLES[place] if part is None else (part, 8)
    for number in range(1 + first, total + 1, step):
        run.clear()
        if stopped:
            shutil.copytree(stopped, run.run)
        told = ""
        if fault == "SIGTERM":
            statuses = run.do_with_fault(work, process, stop_before=number)
            said = "--resume continues from there" in run.told()
            assert not said or statuses == [128 + signal.SIGTERM] * processes
            told = "stopped with a line, " if said else "outside of the loop, "
        elif fault == "disk full":  # from then on; it has space again for `result`
            statuses = run.do_with_fault(work, process, full_from=number)
            assert all(statuses) or not any(statuses)
            assert not any(statuses) or "No space left on device" in run.logs[process].read_text()
        else:
            statuses = run.do_with_fault(work, process, kill_before=number, power="power" in fault)
            assert statuses[process] == KILLED
            for other in {0, processes - 1} - {
                process
            }:  # with an error if there was anything left to do together
                said = run.logs[other].read_text()
                assert statuses[other] == 0 or "onnection" in said.splitlines()[-1], said
        kind = "a resumed run" if resumes else "a run with two saves"
        run.result(f"{fault} before file-system calls of {kind}, {processes} process(es)", told)


@pytest.mark.parametrize("name", SCENES)
def test_killed_after_its_first_state(scene: MakeScene, name: str):
    """Every stage, objective, precision and choice of what trains."""
    run = scene(name)
    run.stopped_with_a_state(part=0.6).rename(run.run)
    assert "--resume" in run.result("killed after the first state, in all kinds of training")


@pytest.mark.parametrize(
    "size", [0, 100, 3000, *(pytest.param(2**n, marks=at_night) for n in range(6, 19))]
)
def test_no_file_longer_than(scene: MakeScene, size: int):
    """A write that stops in the middle of a file, as on a disk that gets full."""
    run = scene()
    run.logs = [Path(os.devnull)]
    run.do(run.train, lambda number: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    run.result("writes that stop within a file, at 16 lengths")


@pytest.mark.parametrize(
    ("processes", "process"), [(1, 0), *(pytest.param(2, n, marks=at_night) for n in (0, 1))]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "P3O" else at_night) for name in SCENES]
)
def test_killed_at_random(scene: MakeScene, name: str, processes: int, process: int):
    run, chance = scene(name, processes), random.Random(f"{name} {process}")
    for number in range(int(TRIES or 3 - processes)):
        run.clear()
        for kill in range(1 + number % 3):
            pids = run.start(run.resume if kill else run.train)
            time.sleep(run.seconds * chance.uniform(0.1, 1))
            os.kill(pids[process], signal.SIGKILL)
            wait_together(pids)
        run.result(f"`kill -9` at random, one to three times, {processes} process(es)")


@pytest.mark.parametrize(
    ("to", "number"),
    [
        *(
            ((0,), number)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
        ),
        *(
            pytest.param(to, number, marks=at_night)
            for to in ((0, None), (None, 1), (0, 1))
            for number in (signal.SIGTERM, signal.SIGUSR1)
        ),
    ],
)
@pytest.mark.parametrize(
    "name", ["P3O", *(pytest.param(name, marks=at_night) for name in ("SFT", "reward model"))]
)
def test_asked_to_stop_at_random(scene: MakeScene, name, to, number, tmp_path_factory, monkeypatch):
    """to: for each process whether it is the one, or None."""
    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    run, chance = scene(name, len(to)), random.Random(f"{number} {to}")
    for _ in range(int(TRIES or 1)):
        run.clear()
        pids = run.start(run.train)
        time.sleep(run.seconds * chance.uniform(0.1, 0.9))
        for process in to:
            if process is not None:
                os.kill(pids[process], number)
        statuses = wait_together(pids)
        said = "--resume continues from there" in run.told()
        # Before the loop there is nothing to save, and after it nothing to stop.
        assert (statuses == [128 + number] * len(to)) == said, run.told()
        assert not list(scratch.iterdir())
        told = "stopped with a line, " if said else "outside of the loop, "
        run.result("SIGTERM, SIGINT, SIGUSR1 and SIGHUP at random times", told)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=at_night)])
@pytest.mark.parametrize("alone", [False, True], ids=["with-the-state-before", "alone"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_of_the_newest_state(
    scene: MakeScene, damage: str, alone: bool, processes: int
):
    run = scene(processes=processes)
    assert not any(run.do(run.train))
    older, newest = run.states()
    finished = run.folder / "finished"
    run.run.rename(finished)
    names = sorted(os.listdir(finished / "state" / newest))
    assert sum(name.endswith(".safetensors") for name in names) == processes
    for name in names:
        run.clear()
        shutil.copytree(finished, run.run)
        DAMAGES[damage](run.run / "state" / newest / name)
        what = f"each file of the newest state flipped, cut, padded or removed, {processes} process(es)"
        if alone:
            shutil.rmtree(run.run / "state" / older)
            assert run.do(run.resume) == [1] * processes
            for log in run.logs:
                assert (
                    f"no state is whole. run/state/{newest} is corrupt: {name}" in log.read_text()
                )
            COUNTS[f"{what}, and there is no other"]["refused with the file's name"] += 1
        else:
            run.result(f"{what}, with one before it")
            assert f"run/state/{newest} is corrupt: {name}" in run.told()


def test_a_second_process_is_refused(scene: MakeScene):
    run = scene()
    (first,) = run.start(run.train)
    deadline = time.monotonic() + 60
    while not (run.run / "config.yaml").exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(first, signal.SIGSTOP)
    second_log = run.folder / "second.txt"
    assert wait_together([fork(run.resume, second_log)]) == [1]
    os.kill(first, signal.SIGCONT)
    assert "another process trains in run (process" in second_log.read_text()
    assert wait_together([first]) == [0]
    assert run.outcome() == run.expected
    COUNTS["two processes in one folder"]["the second refused, the first identical"] += 1


def test_a_folder_that_a_process_does_not_see_is_refused(scene: MakeScene, tmp_path_factory):
    run, other = scene(processes=2), tmp_path_factory.mktemp("other")
    assert run.do(run.train, lambda number: os.chdir(other) if number else None) == [1, 1]
    for log in run.logs:
        assert (
            f"--output_dir: {other}/run on {socket.gethostname()} is not {run.run} on"
            in log.read_text()
        )
    assert not [*other.iterdir(), *run.folder.glob("*.unfinished-*")]


@pytest.mark.parametrize("name", ["P3O", pytest.param("SFT", marks=at_night)])
@pytest.mark.parametrize("processes", [(0, 1), (0,), (1,)], ids=str)
def test_an_error_of_any_kind_loses_no_state_that_is_whole(
    scene: MakeScene, name: str, processes: tuple[int, ...]
):
    """It comes while the state after step 2 is being written, in one or both of two processes."""
    run = scene(name, 2)

    def break_down(number: int) -> None:
        step, made = Optimizer.step, itertools.count(1)

        def counted(*given: object) -> object:
            if next(made) == (5 if name == "P3O" else 3) and number in processes:
                raise ZeroDivisionError("nobody has thought of it")
            return step(*given)

        Optimizer.step = counted

    assert all(run.do(run.train, break_down))
    assert "nobody has thought of it" in run.logs[processes[0]].read_text()
    assert "identical after" in run.result("an error that nobody has thought of")
    assert f"resuming after {'update' if name == 'P3O' else 'step'} 2" in run.told()


HANGS = [
    ("P3O", "stopped", 0, "in process 0 or torchrun there, which has the store;"),
    ("P3O", "stopped in a reward", 1, "(the start, evaluation);"),
    ("P3O", "asleep", 1, "(update 1, update);"),
    pytest.param("SFT", "asleep", 0, "(step 1, update);", marks=at_night),
    ("P3O", "asleep in a reward", 1, "it has slept long enough"),
]


@pytest.mark.parametrize(("name", "hangs", "process", "says"), HANGS)
def test_a_process_that_hangs_is_named_and_one_that_works_alone_is_not(
    scene, name, hangs, process, says
):
    def hang(*_: object) -> None:
        if "stopped" in hangs:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(LONGEST if hangs == "asleep" else 6.0)
        raise FunctionError("it has slept long enough")

    place = (FunctionReward, "__call__") if "reward" in hangs else (Optimizer, "step")
    run = scene(name, 2)
    work = partial(run.train, hang_minutes=0.03)
    pids = run.start(work, lambda number: setattr(*place, hang) if number == process else None)
    try:
        assert wait_together([pids[1 - process]]) == [1]
    finally:
        os.kill(pids[process], signal.SIGKILL)
        wait_together([pids[process]])
    said = run.logs[1 - process].read_text()
    assert says in said
    assert ("no progress for 0.03 minutes" in said) == (hangs != "asleep in a reward")
    assert f" process {1 - process} " not in said


def test_killed_within_the_write_of_a_model(scene: MakeScene):
    """safetensors writes in Rust, where no call of Python can be seen."""

    def half_a_file(number: int) -> None:
        from transformers import modeling_utils

        def write(tensors: dict, filename: str, **_: object) -> None:
            Path(filename).write_bytes(b"\0" * 1000)
            os._exit(KILLED)

        modeling_utils.safe_save_file = write

    run = scene()
    assert run.do(run.train, half_a_file) == [KILLED]
    assert not (run.run / "model").exists()
    assert not (run.run / "checkpoint-000002").exists()
    run.result("killed within the write of a model")


def test_one_process_goes_on_with_what_two_left(scene: MakeScene):
    run = scene(processes=2)
    for process, part in ((0, 0.5), (1, 0.9)):
        run.stopped_with_a_state(process, part).rename(run.run)
        assert run.furthest_alone() <= 1e-4
        COUNTS["either process killed, and one alone goes on"]["the same up to rounding"] += 1


@pytest.mark.faults
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize(
    ("fault", "nodes"), [("kill_before", 1), ("kill_before", 2), ("full_from", 1)]
)
def test_torchrun_starts_again(scene: MakeScene, fault: str, nodes: int, process: int):
    run = scene(processes=2)
    number = int(0.6 * run.calls[process])
    _, _, settings = SCENES["SFT"]
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    flags += ["--model", run.model, "--output_dir", "run", "--resume"]
    faulty = [str(process), fault, str(number), "sft", *flags]
    status, said = torchrun(Path(__file__).with_name("faulty_process.py"), *faulty, nodes=nodes)
    assert status == 0, said
    assert "resuming after step" in said
    assert run.outcome() == run.expected
    COUNTS["`torchrun --max-restarts`: killed, or disk full, on one node or two"]["identical"] += 1
