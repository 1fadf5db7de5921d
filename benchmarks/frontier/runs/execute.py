"""The whole comparison in one command; runs that are in runs.jsonl already are not run again.

python benchmarks/frontier/run.py                                        everything
python benchmarks/frontier/run.py --parts offsets --groups languages     some questions (plan.py), on one group
python benchmarks/frontier/run.py --only language-0-ppo --results again  some runs again, by how their names begin
"""

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.frontier import figures, tables
from benchmarks.frontier.duels import EQUAL_KL, as_they_ended, at_equal_kl, model_of, win_rates
from benchmarks.frontier.optimum import optimum
from benchmarks.frontier.plan import (
    ALGORITHMS,
    DOCSTRINGS,
    GROUPS,
    LEARNING_RATES,
    PARTS,
    SETTINGS,
    Run,
)
from benchmarks.frontier.records import RESULTS, name_of
from benchmarks.frontier.runs import record_of
from benchmarks.frontier.tasks import Task, make
from fastp3o.evaluation.matched_kl import gain_at_kl

# Where learning rates are compared, in nats per response, and how much further a run must get, so that others get
# there too.
SELECTION_KL = {"languages": 4.0, DOCSTRINGS: 0.2}
MARGIN = 1.5


def main() -> None:
    arguments = parse()
    arguments.results.mkdir(parents=True, exist_ok=True)
    records, trained = arguments.results / "runs.jsonl", arguments.runs / "trained"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        arguments.workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for group in arguments.groups:
            for part in arguments.parts:
                runs = waiting([run for run in PARTS[part](group) if run.name.startswith(arguments.only)], records)
                tasks = tasks_of(pool, {run.task for run in runs}, arguments.runs)
                execute(pool, f"{group}: {part}", runs, tasks, trained, records)
                if part == "rates" and not arguments.only:
                    choose_rates(group, read(records))
                if part == "main":
                    compare_finished(pool, group, arguments)
    if arguments.results == RESULTS:
        tables.write()
        figures.main()


def compare_finished(pool: ProcessPoolExecutor, group: str, arguments: argparse.Namespace) -> None:
    """The optimum that none can pass, and win rates: as the main runs ended, if their models are here, and at equal KL,
    if that has not been recorded. Nothing while main runs are missing, as --only leaves them.
    """
    runs, trained, path = list(PARTS["main"](group)), arguments.runs / "trained", arguments.results / "win_rates.json"
    if waiting(runs, arguments.results / "runs.jsonl"):
        return
    records = read(arguments.results / "runs.jsonl")
    if all(Path(model_of(run, trained)).exists() for run in runs):
        tasks = tasks_of(pool, {run.task for run in runs}, arguments.runs)
        write_optima(pool, tasks, arguments.results / "optimum.json")
        write_win_rates(win_rates(pool, tasks, as_they_ended(group, trained, records), None), path)
    equal_kl = EQUAL_KL.get(group)
    if equal_kl is not None and (group, equal_kl) not in map(duel_of, win_rates_in(path)):
        tasks = tasks_of(pool, {run.task for run in runs}, arguments.runs)
        write_win_rates(win_rates(pool, tasks, at_equal_kl(pool, group, tasks, trained, records), equal_kl), path)


def tasks_of(pool: ProcessPoolExecutor, names: set[str], folder: Path) -> dict[str, Task]:
    return dict(zip(sorted(names), pool.map(partial(make, folder=folder), sorted(names)), strict=True))


def waiting(runs: list[Run], records: Path) -> list[Run]:
    """Those that are not recorded, each once."""
    done = {name_of(record) for record in read(records)}
    return [run for run in dict.fromkeys(runs) if run.name not in done]


def execute(
    pool: ProcessPoolExecutor, title: str, runs: list[Run], tasks: dict[str, Task], folder: Path, records: Path
) -> None:
    """Adds a line to `records` for each run as it ends."""
    futures = [pool.submit(record_of, run, tasks[run.task], folder) for run in runs]
    for future in tqdm(as_completed(futures), title, total=len(runs), unit="run"):
        with records.open("a") as file:
            file.write(json.dumps(future.result()) + "\n")


def read(records: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []


def choose_rates(group: str, records: list[dict[str, Any]]) -> None:
    """Writes each algorithm's learning rate with the highest mean gain at the selection KL, over its selection runs.

    A rate with which a run does not get beyond that KL, or passes it before the first evaluation, is not chosen: lower
    rates are better at a KL as long as they reach it.
    """
    selection = {run.name for run in PARTS["rates"](group)}
    chosen = {}
    for algorithm in ALGORITHMS:
        gains: dict[float, list[float | None]] = {rate: [] for rate in LEARNING_RATES[group]}
        for record in records:
            if record["algorithm"] == algorithm and name_of(record) in selection:
                far = record["evaluations"][-1]["kl"] >= MARGIN * SELECTION_KL[group]
                gain = gain_at_kl(record["evaluations"], SELECTION_KL[group])
                gains[record["learning_rate"]].append(gain if far else None)
        means = {rate: sum(values) / len(values) for rate, values in gains.items() if values and None not in values}
        if not means:
            raise RuntimeError(f"{group}: no rate of {algorithm} gets beyond KL {SELECTION_KL[group]} in all its runs")
        chosen[algorithm] = max(means, key=means.get)
    settings = json.loads(SETTINGS.read_text()) if SETTINGS.exists() else {}
    SETTINGS.write_text(json.dumps(settings | {group: chosen}, indent=2) + "\n")
    print(f"{group}: learning rates {chosen}")


def write_optima(pool: ProcessPoolExecutor, tasks: dict[str, Task], path: Path) -> None:
    curves = json.loads(path.read_text()) if path.exists() else {}
    missing = {name: pool.submit(optimum, task) for name, task in tasks.items() if name not in curves}
    path.write_text(json.dumps(curves | {name: future.result() for name, future in missing.items()}) + "\n")


def win_rates_in(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


def write_win_rates(rates: list[dict[str, Any]], path: Path) -> None:
    """In place of those of the same duels."""
    new = set(map(duel_of, rates))
    path.write_text(json.dumps([one for one in win_rates_in(path) if duel_of(one) not in new] + rates, indent=1) + "\n")


def duel_of(rate: dict[str, Any]) -> tuple[str, float | None]:
    return rate["task"], rate["equal_kl"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS, help="Tasks.")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="Questions, see plan.py.")
    parser.add_argument("--only", default="", help="Only runs whose name begins so.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="Folder of runs.jsonl.")
    parser.add_argument("--runs", type=Path, default=Path("runs/frontier"), help="Folder of models and logs.")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="Runs at a time, one thread each.")
    return parser.parse_args()


if __name__ == "__main__":
    main()
