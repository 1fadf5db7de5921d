"""Executes the runs of the plan that are not recorded yet. From finished ones follow learning rates and other settings,
the optimum that no policy can pass, and win rates.
"""

import json
import multiprocessing
from collections.abc import Iterable
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.frontier.runs import records as recorded
from benchmarks.frontier.runs.choice import (
    choose_at_equal_kl,
    choose_corrections,
    choose_own_parameters,
    choose_rates,
    choose_rates_of,
    choose_settings,
    choose_slow_settings,
)
from benchmarks.frontier.runs.duels import EQUAL_KL, as_they_ended, at_equal_kl, model_folder, win_rates
from benchmarks.frontier.runs.one_run import train_and_record
from benchmarks.frontier.runs.parts import ARMS, parts_of
from benchmarks.frontier.runs.plan import Run, algorithms
from benchmarks.frontier.runs.worker import begin_worker
from benchmarks.frontier.tasks.groups import SIZES, WRONG_LABELS, base_of, group_of
from benchmarks.frontier.tasks.optimum import optimum
from benchmarks.frontier.tasks.task import Task, make

# A part -> the choice that its runs decide.
CHOICES = {
    "rates": choose_rates,
    "own_parameters": choose_own_parameters,
    "trial_rates": choose_settings,
    "trial_kl_coefs": choose_settings,
    "corrections": choose_corrections,
    "equal_kl_trials": choose_slow_settings,
    "equal_kl_longer": choose_at_equal_kl,
    **{f"{question}_rates": partial(choose_rates_of, arms) for question, arms in ARMS.items()},
}


def execute(
    groups: Iterable[str], parts: Iterable[str], results: Path, folder: Path, *, only: str = "", workers: int | None
) -> None:
    """Executes the runs of some parts that `results`/runs.jsonl lacks and whose names begin with `only`.

    folder: holds the tasks, trained models and logs. workers: runs at a time, one thread each.
    """
    results.mkdir(parents=True, exist_ok=True)
    records, trained = results / "runs.jsonl", folder / "trained"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=begin_worker) as pool:
        for group in groups:
            asked = {name: part for name, part in parts_of(group).items() if name in parts}
            for name, part in asked.items():
                asked_for = [run for run in part(group) if run.name.startswith(only)]
                runs = waiting(asked_for, records)
                if not only:
                    write_optima(pool, {run.task for run in asked_for}, folder, results / "optimum.json")
                tasks = make_tasks(pool, {run.task for run in runs}, folder)
                record_all(pool, f"{group}: {name}", runs, tasks, trained, records)
                if name in CHOICES and not only:
                    CHOICES[name](group, recorded.load(records))
                if name == "algorithms":
                    compare_finished(pool, group, results, folder)


def waiting(runs: list[Run], records: Path) -> list[Run]:
    """The runs that are not recorded, each once."""
    done = set(recorded.load(records).runs["name"])
    return [run for run in dict.fromkeys(runs) if run.name not in done]


def make_tasks(pool: Executor, names: set[str], folder: Path) -> dict[str, Task]:
    """Makes the tasks, first those whose parts others reuse: no two processes may make the same one."""
    bases = {base_of(name) for name in names if group_of(name) in (*WRONG_LABELS, *SIZES)}
    made: dict[str, Task] = {}
    for some in (sorted(bases), sorted(names)):
        made = dict(zip(some, pool.map(partial(make, folder=folder), some), strict=True))
    return made


def record_all(
    pool: Executor, title: str, runs: list[Run], tasks: dict[str, Task], trained: Path, records: Path
) -> None:
    """Adds a line to `records` for each run as it ends."""
    futures = [pool.submit(train_and_record, run, tasks[run.task], trained) for run in runs]
    for future in tqdm(as_completed(futures), title, total=len(runs), unit="run"):
        with records.open("a") as file:
            file.write(json.dumps(future.result()) + "\n")


def compare_finished(pool: Executor, group: str, results: Path, folder: Path) -> None:
    """Writes the win rates of a group's finished runs: as they ended, if their models are here, and at equal KL, if not
    recorded yet. Does nothing while some of these runs are missing, as with `only`.
    """
    runs, trained, path = list(algorithms(group)), folder / "trained", results / "win_rates.json"
    if waiting(runs, results / "runs.jsonl"):
        return
    records = recorded.load(results / "runs.jsonl")
    if all(Path(model_folder(run, trained)).exists() for run in runs):
        tasks = make_tasks(pool, {run.task for run in runs}, folder)
        write_win_rates(win_rates(pool, tasks, as_they_ended(runs, trained, records), None), path)
    equal_kl = EQUAL_KL.get(group)
    if equal_kl is not None and (group, equal_kl) not in map(duel_of, read_win_rates(path)):
        tasks = make_tasks(pool, {run.task for run in runs}, folder)
        players = at_equal_kl(pool, runs, equal_kl, tasks, trained, records)
        write_win_rates(win_rates(pool, tasks, players, equal_kl), path)


def write_optima(pool: Executor, names: set[str], folder: Path, path: Path) -> None:
    """Writes the optimum of the tasks that have none yet, even if all their runs are recorded."""
    curves = json.loads(recorded.read(path) or "{}")
    tasks = make_tasks(pool, names - curves.keys(), folder)
    missing = {name: pool.submit(optimum, task) for name, task in tasks.items()}
    path.write_text(json.dumps(curves | {name: future.result() for name, future in missing.items()}) + "\n")


def read_win_rates(path: Path) -> list[dict[str, Any]]:
    return json.loads(recorded.read(path) or "[]")


def write_win_rates(rates: list[dict[str, Any]], path: Path) -> None:
    """Writes the rates, replacing those of the same duels."""
    new = set(map(duel_of, rates))
    kept = [rate for rate in read_win_rates(path) if duel_of(rate) not in new]
    path.write_text(json.dumps(kept + rates, indent=1) + "\n")


def duel_of(rate: dict[str, Any]) -> tuple[str, float | None]:
    """The key of a duel: the group of tasks, and the KL at which all were stopped."""
    return rate["task"], rate["equal_kl"]
