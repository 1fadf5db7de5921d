"""Whatever stops one of two processes that share a model, and wherever: the other ends too, and says why, and
`--resume` ends with the bits of a run that was not stopped.

A sample is part of the suite, as in `test_faults.py`, where the faults of one process are.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fastp3o.run.faults.damages import DAMAGES
from tests.fastp3o.run.faults.injection import KILLED, FileCalls, wait_together
from tests.fastp3o.run.faults.scenes import SCENES, SharedScene
from tests.fastp3o.torchrun import torchrun

Count = Callable[[str, str], None]

MAIN, OTHER = 0, 1
# The process, and which of its calls: some in the suite; or a part of all.
SAMPLE = [
    pytest.param(MAIN, (99, 200), id="main-sample"),
    pytest.param(OTHER, (2, 40), id="other-sample"),
    pytest.param(OTHER, (0, 1), id="other", marks=pytest.mark.faults),
    *(pytest.param(MAIN, (part, 8), id=f"main-part{part}", marks=pytest.mark.faults) for part in range(8)),
]
calls_in_process = pytest.mark.parametrize(("process", "sample"), SAMPLE)
VARIANTS = ("SFT", "reward model", "P3O", "PPO", "fp16", "bf16", "LoRA", "top layer", "checkpointing, offload")
TRIES = int(os.environ.get("FASTP3O_KILLS", "1"))


@pytest.fixture
def sft(workplace: Path, tiny_model: str) -> SharedScene:
    return SharedScene("SFT", tiny_model, workplace)


def with_calls(process: int, calls: FileCalls) -> Callable[[int], None]:
    """Prepares the processes so that the calls of one are counted."""
    return lambda number: calls.install() if number == process else None


def numbers(total: int, sample: tuple[int, int]) -> Iterator[int]:
    first, step = sample
    return iter(range(1 + first, total + 1, step))


def require_end(scene: SharedScene, statuses: list[int], process: int) -> None:
    """The other process ends with an error where this one was killed, if there was anything left to do together."""
    assert statuses[process] == KILLED
    said = scene.logs[1 - process].read_text()
    assert statuses[1 - process] == 0 or "onnection" in said.splitlines()[-1], said


def halfway(scene: SharedScene) -> Path:
    """A run with a state whose main process was killed after it; to be copied."""
    kill(scene, MAIN, scene.calls[MAIN] // 2)
    stopped = scene.folder / "stopped"
    scene.run.rename(stopped)
    return stopped


def kill(scene: SharedScene, process: int, number: int) -> None:
    """A run with a state, of which a process is killed before its call of this number."""
    scene.clear()
    require_end(scene, scene.do(scene.train, with_calls(process, FileCalls(scene.run, kill_before=number))), process)
    assert scene.states()


@calls_in_process
def test_killed_before_a_call_of_a_run(sft: SharedScene, count: Count, process: int, sample: tuple[int, int]):
    for number in numbers(sft.calls[process], sample):
        sft.clear()
        calls = FileCalls(sft.run, kill_before=number)
        require_end(sft, sft.do(sft.train, with_calls(process, calls)), process)
        count("killed before each file-system call of a run with two saves, in either process", sft.result())


@calls_in_process
def test_killed_before_a_call_of_a_resumed_run(sft: SharedScene, count: Count, process: int, sample: tuple[int, int]):
    stopped = halfway(sft)
    shutil.copytree(stopped, sft.run)
    for number in numbers(sft.count_calls(sft.resume)[process], sample):
        sft.clear()
        shutil.copytree(stopped, sft.run)
        calls = FileCalls(sft.run, kill_before=number)
        require_end(sft, sft.do(sft.resume, with_calls(process, calls)), process)
        count("killed before each file-system call of a resumed run, in either process", sft.result())


@calls_in_process
def test_a_disk_that_is_full_for_one(sft: SharedScene, count: Count, process: int, sample: tuple[int, int]):
    for number in numbers(sft.calls[process], sample):
        sft.clear()
        calls = FileCalls(sft.run, full_from=number)
        statuses = sft.do(sft.train, with_calls(process, calls))
        if any(statuses):
            assert all(statuses)
            assert "No space left on device" in sft.logs[process].read_text()
        count("disk full from each file-system call of either process on, then space again", sft.result())


@calls_in_process
def test_asked_to_stop_before_a_call(sft: SharedScene, count: Count, process: int, sample: tuple[int, int]):
    """SIGTERM to one process, also between its write of its part and the main process's rename."""
    first, step = sample
    sample = first, step * (4 if process == MAIN else 1)
    for number in numbers(sft.calls[process], sample):
        sft.clear()
        statuses = sft.do(sft.train, with_calls(process, FileCalls(sft.run, stop_before=number)))
        said = "--resume goes on from there" in sft.told()
        if said:
            assert statuses == [128 + signal.SIGTERM] * 2
        told = "both stopped with a line, " if said else "outside of the loop, "
        count("SIGTERM before each fourth file-system call of the main process, each of the other", told + sft.result())


@pytest.mark.faults
@pytest.mark.parametrize("to", [(MAIN,), (OTHER,), (MAIN, OTHER)], ids=["main", "other", "both"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_asked_to_stop_at_random(sft: SharedScene, count: Count, number: signal.Signals, to: tuple[int, ...]):
    chance = random.Random(f"{number} {to}")
    for _ in range(TRIES):
        sft.clear()
        pids = sft.start(sft.train)
        time.sleep(sft.seconds * chance.uniform(0.3, 0.9))
        for process in to:
            os.kill(pids[process], number)
        statuses = wait_together(pids)
        said = "--resume goes on from there" in sft.told()
        if said:
            assert statuses == [128 + number] * 2
        told = "both stopped with a line, " if said else "outside of the loop, "
        count("SIGTERM and SIGUSR1 at random times, to either process or both", told + sft.result())


@pytest.mark.faults
@pytest.mark.parametrize("process", [MAIN, OTHER])
@pytest.mark.parametrize("name", VARIANTS)
def test_killed_at_random(workplace: Path, tiny_model: str, count: Count, name: str, process: int):
    scene = SharedScene(name, tiny_model, workplace)
    chance = random.Random(f"{name} {process}")
    for _ in range(TRIES):
        scene.clear()
        pids = scene.start(scene.train)
        time.sleep(scene.seconds * chance.uniform(0.1, 0.95))
        os.kill(pids[process], signal.SIGKILL)
        wait_together(pids)
        count("`kill -9` of either process at random", scene.result())


def test_one_process_goes_on_with_what_two_left(sft: SharedScene, count: Count):
    for process, part in ((MAIN, 0.5), (OTHER, 0.9)):
        sft.clear()
        kill(sft, process, int(part * sft.calls[process]))
        assert sft.furthest_alone() <= 1e-4
        count("either process killed, and one alone goes on", "the same up to rounding")


@pytest.mark.faults
@pytest.mark.parametrize("process", [MAIN, OTHER])
@pytest.mark.parametrize("fault", ["kill_before", "full_from"])
def test_torchrun_starts_again(sft: SharedScene, count: Count, fault: str, process: int):
    number = int(0.6 * sft.calls[process])
    sft.clear()
    _, _, settings = SCENES["SFT"]
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    flags += ["--model", sft.model, "--output_dir", "run", "--resume"]
    faulty = [str(process), fault, str(number), "sft.py", *flags]
    done = torchrun(Path(__file__).with_name("faulty_process.py"), *faulty, options=("--max-restarts", "1"))
    assert done.returncode == 0, done.stderr
    assert "resuming after step" in done.stdout
    assert sft.outcome() == sft.expected
    count("`torchrun --max-restarts`: killed, or disk full, in either process", "identical")


@pytest.mark.faults
@pytest.mark.parametrize("alone", [False, True], ids=["with-the-state-before", "alone"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_of_the_newest_state(sft: SharedScene, count: Count, damage: str, alone: bool):
    assert not any(sft.do(sft.train))
    older, newest = sft.states()
    finished = sft.folder / "finished"
    sft.run.rename(finished)
    names = sorted(os.listdir(finished / "state" / newest))
    assert sum("model" in name for name in names) == 2
    for name in names:
        sft.clear()
        shutil.copytree(finished, sft.run)
        DAMAGES[damage](sft.run / "state" / newest / name)
        what = "each file of the newest state, of either process, flipped, cut, padded or removed"
        if alone:
            shutil.rmtree(sft.run / "state" / older)
            assert sft.do(sft.resume) == [1, 1]
            for log in sft.logs:
                assert f"no state is whole. run/state/{newest} is corrupt: {name}" in log.read_text()
            count(f"{what}, and there is no other", "refused with the file's name")
        else:
            count(f"{what}, with one before it", sft.result())
            assert f"run/state/{newest} is corrupt: {name}" in sft.told()
