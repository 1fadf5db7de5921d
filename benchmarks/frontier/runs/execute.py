"""Executes the runs of the plan that are not recorded yet, and makes the choices that follow from
finished ones.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from threading import Thread

import torch
from tqdm import tqdm

from benchmarks.frontier.runs import choice, records, rewards, settings, stale
from benchmarks.frontier.runs.one_run import train_and_record
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.tuned_arms import results, trials
from benchmarks.frontier.tasks.task import Task, make

# Question -> its arms. The part QUESTION_rates tries their learning rates, the part QUESTION runs
# them.
ARMS: dict[str, Callable[[], Iterator[Run]]] = {
    **{f"lag_{lag}": partial(stale.at_lag, lag) for lag in stale.LAGS},
    "offset_doses": rewards.without_offset,
    "scales": rewards.scales,
    "two_responses": settings.two_responses,
}


def parts() -> dict[
    str, tuple[Callable[[], Iterable[Run]], Callable[[records.Records], None] | None]
]:
    """The parts of the study in their order: what each runs, and the choice that its runs decide."""
    found: dict = {"corrections": (stale.corrections, choice.choose_corrections)}
    for question, arms in ARMS.items():
        found[f"{question}_rates"] = (
            lambda arms=arms: trials(arms()),
            partial(choice.choose_rates_of, arms),
        )
        found[question] = lambda arms=arms: results(arms()), None
    found |= {
        "offset_doses": (rewards.offset_doses, None),
        "offset_bits": (rewards.offset_bits, None),
    }
    return found | {"found_rates": (settings.found_rates_results, None)}


PARTS = parts()


def execute(
    names: Iterable[str], path: Path, folder: Path, *, only: str = "", workers: int | None
) -> None:
    """Executes the runs of some parts that the record lacks and whose names begin with `only`.

    path: of runs.jsonl. folder: holds the tasks, trained models and logs. workers: runs at a time,
    one thread each.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=begin_worker) as pool:
        for name in [name for name in PARTS if name in names]:
            planned, choose = PARTS[name]
            runs = waiting([run for run in planned() if run.name.startswith(only)], path)
            tasks = sorted({run.task for run in runs})
            made = dict(zip(tasks, pool.map(partial(make, folder=folder), tasks), strict=True))
            record_all(pool, name, runs, made, folder / "trained", path)
            if choose and not only:
                choose(records.load(path))


def waiting(runs: list[Run], path: Path) -> list[Run]:
    """The runs that are not recorded, each once."""
    done = set(records.load(path).runs["name"])
    return [run for run in dict.fromkeys(runs) if run.name not in done]


def record_all(
    pool: Executor, title: str, runs: list[Run], tasks: dict[str, Task], trained: Path, path: Path
) -> None:
    """Adds a line to the record for each run as it ends."""
    futures = [pool.submit(train_and_record, run, tasks[run.task], trained) for run in runs]
    for future in tqdm(as_completed(futures), title, total=len(runs), unit="run"):
        with path.open("a") as file:
            file.write(json.dumps(future.result(), separators=(",", ":")) + "\n")


def begin_worker() -> None:
    """Gives torch one thread, and ends the worker with the command that started it, however that
    ends.

    A worker that outlived its command would go on with its run next to those of the next command,
    and a trainer takes a signal as a request to save.
    """
    torch.set_num_threads(1)
    command = multiprocessing.parent_process()
    assert command is not None  # a worker has one

    def end_with_command() -> None:
        command.join()
        os._exit(1)

    Thread(target=end_with_command, daemon=True).start()
