"""Algorithms on step-by-step sums, a line of arithmetic.jsonl for each run.

python -m benchmarks.frontier.runs.arithmetic --algorithms joint ppo --rates 3e-5 1e-4 --seeds 0
"""

import argparse
import hashlib
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState

from benchmarks.frontier.runs.one_run import MINIBATCHES, configuration, rounded_evaluations
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.tasks import arithmetic
from benchmarks.frontier.tasks.task import RESULTS, Task
from fastp3o.config import Named
from fastp3o.run.names import METRICS
from fastp3o.training.loop import train

RESPONSES, UPDATES, PASSES, EVALUATED_AT = 32, 100, 2, "50"
# Of the updates; the record has means over each AVERAGED of them.
LOGGED = ["reward", "tied_prompts", "clip_fraction", "ratio_max", "grad_norm", "entropy", "kl", "response_length"]
LOGGED += ["zero_gradient_fraction", "sampled_again", "seconds"]
AVERAGED = 10


def train_and_record(run: Run, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains in `folder` with further settings; returns the run, its evaluations and the course of its metrics."""
    start, output = folder / f"start-{run.seed}", folder / "trained" / run.name
    if not (start / "policy").exists():
        arithmetic.make(start, run.seed)
    data = {part: str(start / f"prompts.{part}.jsonl") for part in ("train", "eval")}
    task = Task(run.task, str(start / "policy"), "sums:reward", data["train"], data["eval"], 0, 1, arithmetic.is_right)
    config = replace(
        configuration(replace(run, updates=0), task, output),
        **{"reward": Named("sums:reward", arithmetic.reward), "gold_reward": None, "overwrite": True},
        **{"updates": run.updates, "eval_at": EVALUATED_AT, "eval_responses_per_prompt": 2},
        **arithmetic.LENGTHS,
        prompts_per_minibatch=run.prompts_per_update // MINIBATCHES,
        **settings,
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    output.mkdir(parents=True, exist_ok=True)
    with (output.parent / f"{run.name}.txt").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        train(config)
    digest = hashlib.sha256((start / "policy" / "model.safetensors").read_bytes()).hexdigest()
    record = asdict(run) | {"settings": settings, "start": digest}
    return record | {"evaluations": rounded_evaluations(output), "course": course(output)}


def course(folder: Path) -> dict[str, list[float]]:
    """Means over each AVERAGED updates of the metrics that the algorithm has."""
    updates = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    parts = [updates[first : first + AVERAGED] for first in range(0, len(updates), AVERAGED)]
    return {
        name: [float(f"{sum(update[name] for update in part) / len(part):.4g}") for part in parts]
        for name in LOGGED
        if name in updates[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", required=True, help="Of one_run.OWN_SETTINGS.")
    parser.add_argument("--rates", nargs="+", type=float, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, required=True)
    parser.add_argument("--settings", type=json.loads, default={}, help="Further ones of the objective, as JSON.")
    parser.add_argument("--responses_per_prompt", type=int, default=4)
    parser.add_argument("--results", type=Path, default=RESULTS, help="Folder of arithmetic.jsonl.")
    parser.add_argument("--runs", type=Path, default=Path("runs/arithmetic"), help="Folder of starts and logs.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    path, k = asked.results / "arithmetic.jsonl", asked.responses_per_prompt
    for seed, name, rate in product(asked.seeds, asked.algorithms, asked.rates):
        run = Run("arithmetic", name, rate, 0.0, seed, updates=UPDATES, responses_per_prompt=k)
        run = replace(run, prompts_per_update=RESPONSES // k, inner_epochs=0 if name == "rloo" else PASSES)
        planned = asdict(run) | {"settings": asked.settings}
        done = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        if not any(planned.items() <= line.items() for line in done):
            record = train_and_record(run, asked.runs, asked.settings)
            with path.open("a") as file:
                file.write(json.dumps(record, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
