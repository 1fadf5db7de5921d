"""Bands by length on tasks that train, a line of bands.jsonl for each run that it lacks.

FASTP3O_UPDATES=1 bash scripts/quickstart_game.sh      makes the start of the game, in runs/game
python -m benchmarks.frontier.runs.bands               runs all
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState

from benchmarks.frontier.runs.banded_p3o import ARMS, banded_p3o
from benchmarks.frontier.runs.records import add_line, lines_of
from benchmarks.frontier.tasks import arithmetic, two_lengths
from benchmarks.frontier.tasks.task import RESULTS
from fastp3o import FunctionConfig, train
from fastp3o.run.names import EVALUATIONS, METRICS
from fastp3o.sources import InMemory

RECORD = RESULTS / "bands.jsonl"
GAME = Path(__file__).parents[3] / "scripts" / "make_game.py"
# The record has means of these over each AVERAGED of a run's updates.
LOGGED = ("loss/clip_fraction", "loss/gradient_left", "kl_moved", "response_length")
PARTS = 4


class Judge(NamedTuple):
    """A task that trains. kl_coef: β, in the function. settings: of the run. make: the start of a
    seed in a folder, None where one start serves all. rewards: options of a seed.
    """

    seeds: tuple[int, ...]
    kl_coef: float
    settings: dict[str, Any]
    make: Callable[[Path, int], None] | None
    rewards: Callable[[int], dict[str, Any]]


def two_lengths_rewards(seed: int) -> dict[str, Any]:
    task = two_lengths.TwoLengths(seed)
    return {
        "reward": InMemory("two_lengths:reward", task.reward),
        "gold_reward": InMemory("two_lengths:gold", task.gold),
    }


COMMON: dict[str, Any] = {
    "reward_scaling": "none",
    "reward_clip": 0.0,
    "precision": "fp32",
    "report_to": "none",
    "samples_every": 0,
    "log_rollouts": 0,
    "save_minutes": 0.0,
    "overwrite": True,
}
JUDGES = {
    # Rate, β and sizes are those of joint P3O on the study's languages.
    "languages": Judge(
        tuple(range(6)),
        0.03,
        two_lengths.LENGTHS
        | {"learning_rate": 6e-4, "updates": 20, "inner_epochs": 4, "eval_at": "5,10"}
        | {"prompts_per_update": 32, "prompts_per_minibatch": 8, "responses_per_prompt": 4}
        | {"tokens_per_row": 2048, "eval_responses_per_prompt": 4, "eval_batch_size": 128},
        two_lengths.make,
        two_lengths_rewards,
    ),
    # At 1e-4 the clipping has something to do; at 3e-5, joint P3O's rate, it has not.
    "sums": Judge(
        (4, 7, 15),
        0.0,
        arithmetic.LENGTHS
        | {"learning_rate": 1e-4, "updates": 24, "inner_epochs": 2}
        | {"prompts_per_update": 8, "prompts_per_minibatch": 2, "responses_per_prompt": 4}
        | {"tokens_per_row": 2048, "eval_responses_per_prompt": 2, "eval_batch_size": 128},
        arithmetic.make,
        lambda seed: {"reward": InMemory("sums:reward", arithmetic.reward)},
    ),
    # The settings of scripts/quickstart_game.sh.
    "game": Judge(
        (0, 1, 2),
        0.0,
        {"max_prompt_tokens": 16, "max_response_tokens": 17, "tokens_per_row": 4096}
        | {"learning_rate": 1e-3, "warmup_steps": 8, "updates": 40, "inner_epochs": 1}
        | {"prompts_per_update": 32, "prompts_per_minibatch": 16, "responses_per_prompt": 8}
        | {"environment": f"{GAME}:Guess", "stop_strings": '["\\n"]', "max_turns": 4}
        | {"max_turn_tokens": 3, "eval_responses_per_prompt": 8},
        None,
        lambda seed: {"reward": "environment"},
    ),
}


def play(name: str, arm: str, seed: int, runs: Path, game: Path) -> dict[str, Any]:
    """Trains one run in `runs`; returns its line."""
    judge, output = JUDGES[name], runs / f"{name}-{arm.replace(' ', '_')}-{seed}"
    start = runs / f"start-{name}-{seed}" if judge.make else game
    runs.mkdir(parents=True, exist_ok=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    with (runs / f"{output.name}.txt").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        if judge.make and not (start / "policy").exists():
            judge.make(start, seed)
            AcceleratorState._reset_state(reset_partial_state=True)
        began = time.process_time()
        config = FunctionConfig(
            **files(start) if judge.make else files_of_game(start),
            **judge.rewards(seed),
            output_dir=str(output),
            seed=seed,
            **COMMON,
            **judge.settings,
        )
        train(config, objective=partial(banded_p3o, kl_coef=judge.kl_coef, **ARMS[arm]))
    line = {
        "judge": name,
        "arm": arm,
        "seed": seed,
        "learning_rate": config.learning_rate,
        "updates": config.updates,
        "seconds": round(time.process_time() - began, 1),
        "evaluations": evaluations(output),
        "course": course(output),
    }
    shutil.rmtree(output)
    return line


def files(start: Path) -> dict[str, Any]:
    policy = str(start / "policy")
    data = {"prompts": "prompts.train", "eval_prompts": "prompts.eval"}
    return {name: str(start / f"{file}.jsonl") for name, file in data.items()} | {
        "model": policy,
        "reference": policy,
    }


def files_of_game(game: Path) -> dict[str, Any]:
    policy = str(game / "sft" / "model")
    return {
        "model": policy,
        "reference": policy,
        "prompts": str(game / "starts.jsonl"),
        "eval_prompts": str(game / "new_starts.jsonl"),
    }


def evaluations(output: Path) -> list[dict[str, float]]:
    """Rounded to six significant digits, finer than their errors."""
    lines = map(json.loads, (output / EVALUATIONS).read_text().splitlines())
    return [{name: float(f"{value:.6g}") for name, value in line.items()} for line in lines]


def course(output: Path) -> dict[str, list[float]]:
    """Means of the LOGGED metrics over each of PARTS of the run."""
    updates = list(map(json.loads, (output / METRICS).read_text().splitlines()))
    size = len(updates) // PARTS
    parts = [updates[size * part : size * (part + 1)] for part in range(PARTS)]
    return {
        name: [float(f"{sum(one[name] for one in part) / size:.4g}") for part in parts]
        for name in LOGGED
        if name in updates[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/bands"), help="Folder of starts and logs."
    )
    parser.add_argument(
        "--game", type=Path, default=Path("runs/game"), help="Folder of scripts/quickstart_game.sh."
    )
    parser.add_argument("--judges", nargs="+", choices=list(JUDGES), default=list(JUDGES))
    parser.add_argument("--seeds", type=int, nargs="+", help="A part of each judge's seeds.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    # All arms of a seed before the next one: a record that is cut off is still balanced.
    for name in asked.judges:
        seeds = [seed for seed in JUDGES[name].seeds if not asked.seeds or seed in asked.seeds]
        for seed, arm in product(seeds, ARMS):
            done = {(line["judge"], line["seed"], line["arm"]) for line in lines_of(RECORD)}
            if (name, seed, arm) not in done:
                line = play(name, arm, seed, asked.runs, asked.game)
                add_line(RECORD, line)


if __name__ == "__main__":
    main()
