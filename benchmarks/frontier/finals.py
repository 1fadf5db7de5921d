"""Finished policies head to head: on the evaluation prompts, by the reward model and by the utility behind it."""

from collections import defaultdict
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from benchmarks.frontier.plan import Run, group_of, main
from benchmarks.frontier.records import Record, name_of
from benchmarks.frontier.tasks import ROLLOUTS, Task
from fastp3o.matched_kl import interval
from fastp3o.pretrained import load_tokenizer
from fastp3o.win_rates.head_to_head import Responses, WinRateConfig, by_reward, prompts_for, respond
from fastp3o.win_rates.rates import win_rate

FIRST = "joint"
START = "sft"


def win_rates(
    pool: Executor, group: str, tasks: dict[str, Task], folder: Path, records: list[Record]
) -> list[dict[str, Any]]:
    """Joint clipping against every other algorithm and the start of all: means over seeds with their intervals.

    first_kl, second_kl: mean final KLs of the models, in nats per response; they differ, and with them what is won.
    """
    of_seeds: dict[int, list[Run]] = defaultdict(list)
    for run in main(group):
        of_seeds[run.seed].append(run)
    rates: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    futures = [pool.submit(of_seed, runs, tasks[runs[0].task], folder) for runs in of_seeds.values()]
    for runs, future in zip(of_seeds.values(), futures, strict=True):
        for key, rate in future.result().items():
            rates[key][runs[0].task].append(rate)
    found = {key: interval(list(of_tasks.values())) for key, of_tasks in rates.items()}
    kls = mean_final_kls(group, records)
    return [
        {"task": group, "first": FIRST, "second": second, "by": by, "seeds": rate.count}
        | {"first_kl": kls[FIRST], "second_kl": kls[second]}
        | {"win_rate": rate.mean, "low": rate.low, "high": rate.high}
        for (second, by), rate in found.items()
    ]


def mean_final_kls(group: str, records: list[Record]) -> dict[str, float]:
    names = {run.name: run.algorithm for run in main(group)}
    kls: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if name_of(record) in names:
            kls[record["algorithm"]].append(record["evaluations"][-1]["kl"])
    return {START: 0.0} | {algorithm: sum(of_runs) / len(of_runs) for algorithm, of_runs in kls.items()}


def of_seed(runs: list[Run], task: Task, folder: Path) -> dict[tuple[str, str], float]:
    """Win rates of joint clipping by rival and by reward ("reward", and "gold" where the utility is known)."""
    models = {run.algorithm: model_of(run, folder) for run in runs} | {START: task.policy}
    responses = {name: responses_of(model, task, runs[0].seed) for name, model in models.items()}
    first = responses.pop(FIRST)
    samples = ROLLOUTS[group_of(task.name)]["eval_samples"]
    return {
        (name, by): win_rate(by_reward(first[by], rival[by]), samples_per_prompt=samples).win_rate
        for name, rival in responses.items()
        for by in rival
    }


def responses_of(model: str, task: Task, seed: int) -> dict[str, Responses]:
    """To all evaluation prompts, with each kind of reward."""
    settings = ROLLOUTS[group_of(task.name)]
    config = WinRateConfig(
        first=model,
        second=model,
        prompts=task.eval_prompts,
        reward=task.reward_model,
        limit=settings.get("eval_limit"),
        max_prompt_tokens=settings["max_prompt_tokens"],
        max_new_tokens=settings["max_new_tokens"],
        eval_samples=settings["eval_samples"],
        seed=seed,
    )
    tokenizer = load_tokenizer(model)
    by_model = respond(model, tokenizer, prompts_for(tokenizer, config), config)
    rollouts = by_model.rollouts
    if task.gold is None:
        return {"reward": by_model}
    return {"reward": by_model, "gold": Responses(rollouts, task.gold(rollouts.prompts, rollouts.responses))}


def model_of(run: Run, folder: Path) -> str:
    return str(folder / run.name / "model")
