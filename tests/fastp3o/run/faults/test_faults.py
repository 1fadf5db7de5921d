"""Whatever stops a run, and wherever: `--resume` ends with the bits of a run that was not stopped.

A sample of each fault is part of the suite; `-m "faults or not faults"` tries all of them, and ends with the
table of benchmarks/README.md. FASTP3O_KILLS: random kills and signals of each run.
"""

import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fastp3o.run.faults.damages import DAMAGES
from tests.fastp3o.run.faults.injection import KILLED, FileCalls, fork, in_child, wait
from tests.fastp3o.run.faults.scenes import SCENES, Scene

Count = Callable[[str, str], None]

# The suite takes every 25th fault of a kind, of which every other one with the power lost; or one of the parts of all.
KILLS = [
    pytest.param((7, 50), False, id="kill-sample"),
    pytest.param((32, 50), True, id="power-sample"),
    *(
        pytest.param((part, 8), power, id=f"{'power' if power else 'kill'}-part{part}", marks=pytest.mark.faults)
        for power in (False, True)
        for part in range(8)
    ),
]
SAMPLE = [
    pytest.param((7, 25), id="sample"),
    *(pytest.param((part, 8), id=f"part{part}", marks=pytest.mark.faults) for part in range(8)),
]
VARIANTS = [pytest.param(name, marks=() if name == "P3O" else pytest.mark.faults) for name in SCENES]


@pytest.fixture
def sft(workplace: Path, tiny_model: str) -> Scene:
    return Scene("SFT", tiny_model, workplace)


def numbers(total: int, sample: tuple[int, int]) -> Iterator[int]:
    first, step = sample
    return iter(range(1 + first, total + 1, step))


def cause(power: bool) -> str:
    return "power lost (what is not synced is lost by half)" if power else "killed"


@pytest.mark.parametrize(("sample", "power"), KILLS)
def test_killed_before_a_call_of_a_run(sft: Scene, count: Count, sample: tuple[int, int], power: bool):
    for number in numbers(sft.calls[0], sample):
        sft.clear()
        calls = FileCalls(sft.run, kill_before=number, power=power)
        assert in_child(sft.train, sft.log, calls.install) == KILLED
        count(f"{cause(power)} before each file-system call of a run with two saves", sft.result())


def halfway(scene: Scene) -> Path:
    """A run with a state, stopped after it; to be copied."""
    scene.clear()
    killed = FileCalls(scene.run, kill_before=scene.calls[0] // 2)
    assert in_child(scene.train, scene.log, killed.install) == KILLED
    assert scene.states()
    stopped = scene.folder / "stopped"
    shutil.rmtree(stopped, ignore_errors=True)
    scene.run.rename(stopped)
    return stopped


@pytest.mark.parametrize(("sample", "power"), KILLS)
def test_killed_before_a_call_of_a_resumed_run(sft: Scene, count: Count, sample: tuple[int, int], power: bool):
    stopped = halfway(sft)
    shutil.copytree(stopped, sft.run)
    (total,) = sft.count_calls(sft.resume)
    for number in numbers(total, sample):
        sft.clear()
        shutil.copytree(stopped, sft.run)
        calls = FileCalls(sft.run, kill_before=number, power=power)
        assert in_child(sft.resume, sft.log, calls.install) == KILLED
        count(f"{cause(power)} before each file-system call of a resumed run", sft.result())


@pytest.mark.parametrize("sample", SAMPLE)
def test_a_disk_that_is_full(sft: Scene, count: Count, sample: tuple[int, int]):
    """The disk is full from one call on; then there is space again."""
    for number in numbers(sft.calls[0], sample):
        sft.clear()
        calls = FileCalls(sft.run, full_from=number)
        status = in_child(sft.train, sft.log, calls.install)
        if status:
            assert "No space left on device" in sft.log.read_text()
        count("disk full from each file-system call on, then space again", sft.result())


@pytest.mark.parametrize("size", [0, 100, 3000, *(pytest.param(2**n, marks=pytest.mark.faults) for n in range(6, 19))])
def test_no_file_longer_than(sft: Scene, count: Count, size: int):
    """A write that stops in the middle of a file, as on a disk that gets full."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    log = Path(os.devnull)
    in_child(sft.train, log, limit)
    count("writes that stop within a file, at 16 lengths", sft.result())


@pytest.mark.parametrize("name", VARIANTS)
def test_killed_at_random(workplace: Path, tiny_model: str, count: Count, name: str):
    scene = Scene(name, tiny_model, workplace)
    tries = int(os.environ.get("FASTP3O_KILLS", "2"))
    chance = random.Random(name)
    for number in range(tries):
        scene.clear()
        kills = 1 + number % 3
        for kill in range(kills):
            pid = fork(scene.resume if kill else scene.train, scene.log)
            time.sleep(scene.seconds * chance.uniform(0.1, 1))
            os.kill(pid, signal.SIGKILL)
            wait(pid)
        count("killed at random, one to three times", scene.result())


@pytest.mark.parametrize("tries", [1, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("name", VARIANTS[:3])
def test_asked_to_stop_at_random(
    workplace: Path,
    tiny_model: str,
    count: Count,
    name: str,
    number: signal.Signals,
    tries: int,
    monkeypatch: pytest.MonkeyPatch,
):
    scene = Scene(name, tiny_model, workplace)
    scratch = workplace / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    chance = random.Random(int(number))
    for _ in range(int(os.environ.get("FASTP3O_KILLS", tries))):
        scene.clear()
        pid = fork(scene.train, scene.log)
        time.sleep(scene.seconds * chance.uniform(0.1, 0.9))
        os.kill(pid, number)
        status = wait(pid)
        said = "--resume goes on from there" in scene.log.read_text()
        # Before the loop there is nothing to save, and after it nothing to stop.
        assert (status == 128 + number) == said, scene.log.read_text()
        assert not list(scratch.iterdir())
        told = "stopped with a line, " if said else "outside of the loop, "
        count("SIGTERM, SIGINT, SIGUSR1 and SIGHUP at random times", told + scene.result())


@pytest.mark.parametrize("alone", [False, True], ids=["with-the-state-before", "alone"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_of_the_newest_state(sft: Scene, count: Count, damage: str, alone: bool):
    assert in_child(sft.train, sft.log) == 0
    older, newest = sft.states()
    finished = sft.folder / "finished"
    sft.run.rename(finished)
    for name in sorted(os.listdir(finished / "state" / newest)):
        sft.clear()
        shutil.copytree(finished, sft.run)
        DAMAGES[damage](sft.run / "state" / newest / name)
        what = "each file of the newest state flipped, cut, padded or removed"
        if alone:
            shutil.rmtree(sft.run / "state" / older)
            assert in_child(sft.resume, sft.log) == 1
            assert f"no state is whole. run/state/{newest} is corrupt: {name}" in sft.log.read_text()
            count(f"{what}, and there is no other", "refused with the file's name")
        else:
            count(f"{what}, with one before it", sft.result())
            assert f"run/state/{newest} is corrupt: {name}" in sft.log.read_text()


@pytest.mark.parametrize("damage", ["cut", "zeros"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl"])
def test_damaged_ends_of_logs(sft: Scene, count: Count, damage: str, name: str):
    shutil.copytree(halfway(sft), sft.run)
    with (sft.run / name).open("ab") as file:
        file.write({"cut": b'{"step": 9, "lo', "zeros": b"\0" * 512}[damage])
    count("a cut line, and zeros, at the end of each log", sft.result())


def test_a_second_process_is_refused(sft: Scene, count: Count):
    first = fork(sft.train, sft.log)
    deadline = time.monotonic() + 60
    while not (sft.run / "config.yaml").exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(first, signal.SIGSTOP)
    second_log = sft.folder / "second.txt"
    assert in_child(sft.resume, second_log) == 1
    os.kill(first, signal.SIGCONT)
    assert "another process trains in run (process" in second_log.read_text()
    assert wait(first) == 0
    assert sft.outcome() == sft.expected
    count("two processes in one folder", "the second refused, the first identical")


def test_killed_within_the_write_of_a_model(sft: Scene, count: Count):
    """safetensors writes in Rust, where no call of Python can be seen."""

    def half_a_file() -> None:
        from transformers import modeling_utils

        def write(tensors: dict, filename: str, **_: object) -> None:
            Path(filename).write_bytes(b"\0" * 1000)
            os._exit(KILLED)

        modeling_utils.safe_save_file = write

    assert in_child(sft.train, sft.log, half_a_file) == KILLED
    assert not (sft.run / "model").exists()
    assert not (sft.run / "checkpoint-000002").exists()
    count("killed within the write of a model", sft.result())
