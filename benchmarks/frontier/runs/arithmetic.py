"""Algorithms on step-by-step sums, a line of arithmetic.jsonl for each run that it lacks.

python -m benchmarks.frontier.runs.arithmetic
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState

from benchmarks.frontier.runs.one_run import configuration, rounded_evaluations
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.records import Records, load
from benchmarks.frontier.runs.settings import FIRST_RATES, KL_PER_UPDATE
from benchmarks.frontier.tasks import arithmetic
from benchmarks.frontier.tasks.task import RESULTS, Task
from fastp3o.evaluation.matched_kl import Seed
from fastp3o.run.names import METRICS
from fastp3o.sources import InMemory
from fastp3o.training.loop import train

RECORD = RESULTS / "arithmetic.jsonl"
# Seeds whose starts solve a tenth of the sums: two choose rates, eight give the results, and on
# five rates are found. A machine that rounds differently makes other starts of them: those from 17
# on are of a second one.
SELECTION, STARTS, FOUND_ON = (0, 1), (4, 5, 7, 10, 11, 13, 15, 17), (17, 20, 22, 24, 25)
RATES = (3e-5, 1e-4)
RESPONSES, UPDATES, PASSES, EVALUATED_AT = 32, 100, 2, "50"
# Algorithm -> its own parameter.
COMPARED = dict.fromkeys(
    ("joint", "separate", "none", "token", "ppo-lambda-1", "grpo-k1", "dapo-k1"), 0.0
)
COMPARED |= {"rloo": 0.0, "rloo-response": 0.0, "rloo-token": 0.0, "rebel": 3.0, "gspo": 0.003}
WITH_16 = ("joint", "grpo-k1", "rloo", "ppo-lambda-1")  # at the rates of 4 responses
# The record has means of these over each AVERAGED updates.
LOGGED = (
    "reward",
    "tied_prompts",
    "sampled_again",
    "clip_fraction",
    "ratio_max",
    "kl",
    "response_length",
    "seconds",
)
AVERAGED = 10


def arm(name: str, responses: int = 4) -> Run:
    return Run(
        task="arithmetic",
        algorithm=name,
        learning_rate=0.0,
        kl_coef=0.0,
        seed=0,
        responses_per_prompt=responses,
        prompts_per_update=RESPONSES // responses,
        own_parameter=COMPARED[name],
        inner_epochs=0 if name == "rloo" else PASSES,
        updates=UPDATES,
    )


def arms() -> list[Run]:
    """What is compared, each at its own rate."""
    return [*map(arm, COMPARED), *(arm(name, 16) for name in WITH_16)]


def found_from(rate: float) -> Run:
    """Joint P3O whose rate is found."""
    return replace(arm("joint"), kl_per_update=KL_PER_UPDATE, learning_rate=rate)


def chosen_rate(records: Records, one: Run) -> float | None:
    """The rate with the highest mean accuracy on the starts that choose, with 4 responses; None
    before all have run.
    """
    four = arm(one.algorithm)
    tried = {
        rate: accuracies(records, replace(four, learning_rate=rate), SELECTION) for rate in RATES
    }
    ran = [rate for rate, found in tried.items() if len(found) == len(SELECTION)]
    return max(ran, key=lambda rate: sum(tried[rate].values())) if len(ran) == len(RATES) else None


def accuracies(records: Records, one: Run, seeds: tuple[int, ...] = STARTS) -> dict[Seed, float]:
    """Held-out accuracy after the last update, of the seeds that have run."""
    names = {seed: replace(one, seed=seed).name for seed in seeds}
    done = records.histories
    return {
        ("", seed): float(done[name][-1]["reward"]) for seed, name in names.items() if name in done
    }


def planned() -> Iterator[Run]:
    """All runs, the results of those arms whose rates were chosen."""
    for name, rate, seed in product(COMPARED, RATES, SELECTION):
        yield replace(arm(name), learning_rate=rate, seed=seed)
    records = load(RECORD)
    for seed, one in (*product(STARTS, arms()), *product(FOUND_ON, [arm("joint")])):
        if chosen := chosen_rate(records, one):
            yield replace(one, learning_rate=chosen, seed=seed)
    for seed, rate in product(FOUND_ON, FIRST_RATES):
        yield replace(found_from(rate), seed=seed)


def train_and_record(run: Run, folder: Path) -> dict[str, Any]:
    """Trains in `folder`; returns the run, its evaluations and the course of its metrics."""
    start, output = folder / f"start-{run.seed}", folder / "trained" / run.name
    if not (start / "policy").exists():
        arithmetic.make(start, run.seed)
    task = Task(
        name=run.task,
        policy=str(start / "policy"),
        reward_model="sums:reward",
        prompts=str(start / "prompts.train.jsonl"),
        eval_prompts=str(start / "prompts.eval.jsonl"),
        reward_mean=0,
        reward_std=1,
        gold=arithmetic.scores,
    )
    config = replace(
        configuration(replace(run, updates=0), task, output),
        reward=InMemory("sums:reward", arithmetic.reward),
        gold_reward=None,
        overwrite=True,
        updates=run.updates,
        eval_at=EVALUATED_AT,
        eval_responses_per_prompt=2,
        max_prompt_tokens=arithmetic.LENGTHS["max_prompt_tokens"],
        max_response_tokens=arithmetic.LENGTHS["max_response_tokens"],
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    output.mkdir(parents=True, exist_ok=True)
    with (
        (output.parent / f"{run.name}.txt").open("w") as log,
        redirect_stdout(log),
        redirect_stderr(log),
    ):
        train(config)
    digest = hashlib.sha256((start / "policy" / "model.safetensors").read_bytes()).hexdigest()
    return asdict(run) | {
        "start": digest,
        "evaluations": rounded_evaluations(output),
        "course": course(output),
    }


def course(folder: Path) -> dict[str, list[float]]:
    """Means over each AVERAGED updates of the metrics that the algorithm has."""
    updates = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    parts = [updates[first : first + AVERAGED] for first in range(0, len(updates), AVERAGED)]
    means = {
        name: [sum(one[name] for one in part) / len(part) for part in parts]
        for name in LOGGED
        if name in updates[0]
    }
    return {name: [float(f"{value:.4g}") for value in values] for name, values in means.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/arithmetic"), help="Folder of starts and logs."
    )
    folder = parser.parse_args().runs
    torch.set_num_threads(1)
    for run in planned():
        if run.name not in load(RECORD).histories:
            with RECORD.open("a") as file:
                file.write(json.dumps(train_and_record(run, folder), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
