"""Finished policies head to head: on the evaluation prompts, by the reward model and by the utility behind it."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.frontier.plan import Run, group_of, main
from benchmarks.frontier.tasks import ROLLOUTS, Task
from fastp3o.matched_kl import interval
from fastp3o.win_rates.head_to_head import Responses, WinRateConfig, by_reward, head_to_head
from fastp3o.win_rates.rates import win_rate

FIRST = "joint"
START = "sft"


def win_rates(group: str, tasks: dict[str, Task], folder: Path) -> list[dict[str, Any]]:
    """Joint clipping against every other algorithm and the start of all: means over seeds with their intervals."""
    of_seeds: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    runs = list(main(group))
    for run in runs:
        if run.algorithm != FIRST:
            continue
        rivals = {other.algorithm: model_of(other, folder) for other in runs if other.seed == run.seed and other != run}
        for name, rival in {**rivals, START: tasks[run.task].policy}.items():
            for by, rate in by_all(tasks[run.task], model_of(run, folder), rival, run.seed).items():
                of_seeds[name, by][run.task].append(rate)
    rates = {key: interval(list(of_tasks.values())) for key, of_tasks in of_seeds.items()}
    return [
        {"task": group, "first": FIRST, "second": second, "by": by, "seeds": rate.count}
        | {"win_rate": rate.mean, "low": rate.low, "high": rate.high}
        for (second, by), rate in rates.items()
    ]


def by_all(task: Task, first: str, second: str, seed: int) -> dict[str, float]:
    """The first's win rate by the reward, and by the utility where it is known."""
    settings = ROLLOUTS[group_of(task.name)]
    config = WinRateConfig(
        first=first,
        second=second,
        prompts=task.eval_prompts,
        reward=task.reward_model,
        limit=settings.get("eval_limit"),
        max_prompt_tokens=settings["max_prompt_tokens"],
        max_new_tokens=settings["max_new_tokens"],
        eval_samples=settings["eval_samples"],
        seed=seed,
    )
    sides = head_to_head(config)
    rates = {"reward": win_rate(by_reward(*sides), samples_per_prompt=config.eval_samples).win_rate}
    if task.gold is not None:
        golds = [Responses(side.rollouts, task.gold(side.rollouts.prompts, side.rollouts.responses)) for side in sides]
        rates["gold"] = win_rate(by_reward(*golds), samples_per_prompt=config.eval_samples).win_rate
    return rates


def model_of(run: Run, folder: Path) -> str:
    return str(folder / run.name / "model")
