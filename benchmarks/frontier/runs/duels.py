"""Win rates of policies on the evaluation prompts, by the reward model and by the true utility.

There are two comparisons: at the end of the runs, each at its own KL, and at one KL for all. Models of the second are
trained again up to that KL, which gives the bits that the runs had.
"""

from collections.abc import Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pandas import DataFrame

from benchmarks.frontier.runs.one_run import train_and_record
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.records import SEED, Records, by_task
from benchmarks.frontier.tasks.groups import LANGUAGES, group_of
from benchmarks.frontier.tasks.task import TASK_SETTINGS, Task
from fastp3o.evaluation.frontier import Evaluations
from fastp3o.evaluation.matched_kl import gain_at_kl, interval
from fastp3o.evaluation.verdicts import win_rate
from fastp3o.evaluation.win_rates import Responses, WinRateConfig, by_reward, prompts_for, respond
from fastp3o.models.loading import load_tokenizer
from fastp3o.rollouts.groups import texts

FIRST = "joint"
START = "sft"
# Nats per response. Win rates on docstrings are too close to one half for a KL to matter.
EQUAL_KL = {LANGUAGES: 4.0}


class Player(NamedTuple):
    model: str
    kl: float  # of its last evaluation, nats per response


def as_they_ended(runs: Iterable[Run], folder: Path, records: Records) -> dict[Run, Player]:
    """The models of recorded runs, which `folder` holds."""
    final_kl = records.runs.set_index("name")["final_kl"]
    return {run: Player(model_folder(run, folder), final_kl[run.name]) for run in runs}


def at_equal_kl(
    pool: Executor, runs: Iterable[Run], kl: float, tasks: dict[str, Task], folder: Path, records: Records
) -> dict[Run, Player]:
    """The models of recorded runs when they reached `kl`, trained again in a folder of their own."""
    stopped = folder / "at_equal_kl"
    updates = {run: update_at(run.name, records.histories[run.name], kl) for run in runs}
    futures = {run: pool.submit(train_and_record, run, tasks[run.task], stopped, up) for run, up in updates.items()}
    ends = {run: future.result()["evaluations"][-1] for run, future in futures.items()}
    return {run: Player(model_folder(run, stopped), end["kl"]) for run, end in ends.items()}


def update_at(name: str, evaluations: Evaluations, kl: float) -> int:
    """The update closest to the first crossing of `kl` (nats). ValueError if that is not between two evaluations."""
    update = gain_at_kl(evaluations, kl, metric="step")
    if update is None:
        raise ValueError(f"{name}: no evaluation reached KL {kl:g} after the first one")
    return round(update)


def model_folder(run: Run, folder: Path) -> str:
    return str(folder / run.name / "model")


def win_rates(
    pool: Executor, tasks: dict[str, Task], players: dict[Run, Player], equal_kl: float | None
) -> list[dict[str, Any]]:
    """Joint clipping against every other algorithm and the start: mean win rates over seeds with their intervals.

    first_kl, second_kl: means of the players' KLs, in nats per response. equal_kl: where all were stopped, None for
    the ends of runs.
    """
    lines = DataFrame({"run": run, "task": run.task, "seed": run.seed} for run in players)
    futures = [
        pool.submit(win_rates_of_seed, {run: players[run] for run in runs}, tasks[task])
        for (task, _), runs in lines.groupby(SEED, sort=False)["run"]
    ]
    found = DataFrame(line for future in futures for line in future.result())
    kls = mean_kls(players)
    means = []
    for (second, by), rates in found.groupby(["second", "by"], sort=False):
        rate = interval(by_task(rates.set_index(SEED)["win_rate"]))
        means.append(
            {"task": group_of(next(iter(tasks))), "equal_kl": equal_kl, "first": FIRST, "second": second, "by": by}
            | {"seeds": rate.count, "first_kl": kls[FIRST], "second_kl": kls[second]}
            | {"win_rate": rate.mean, "low": rate.low, "high": rate.high}
        )
    return means


def mean_kls(players: dict[Run, Player]) -> dict[str, float]:
    """The mean KL of each algorithm; the start's is 0."""
    lines = DataFrame({"algorithm": run.algorithm, "kl": player.kl} for run, player in players.items())
    return {START: 0.0} | lines.groupby("algorithm")["kl"].mean().to_dict()


def win_rates_of_seed(players: dict[Run, Player], task: Task) -> list[dict[str, Any]]:
    """Joint clipping's win rates by rival and by reward ("reward", and "gold" if the utility is known)."""
    seed = next(iter(players)).seed
    models = {run.algorithm: player.model for run, player in players.items()} | {START: task.policy}
    responses = {name: scored_responses(model, task, seed) for name, model in models.items()}
    first = responses.pop(FIRST)
    samples = TASK_SETTINGS[group_of(task.name)]["eval_responses_per_prompt"]
    return [
        {"task": task.name, "seed": seed, "second": name, "by": by}
        | {"win_rate": win_rate(by_reward(first[by], rival[by]), responses_per_prompt=samples).win_rate}
        for name, rival in responses.items()
        for by in rival
    ]


def scored_responses(model: str, task: Task, seed: int) -> dict[str, Responses]:
    """Responses to all evaluation prompts, with each kind of reward."""
    settings = TASK_SETTINGS[group_of(task.name)]
    config = WinRateConfig(
        first=model,
        second=model,
        prompts=task.eval_prompts,
        reward=task.reward_model,
        limit=settings.get("eval_limit"),
        max_prompt_tokens=settings["max_prompt_tokens"],
        max_response_tokens=settings["max_response_tokens"],
        responses_per_prompt=settings["eval_responses_per_prompt"],
        sampler="transformers",  # as in the runs
        seed=seed,
    )
    tokenizer = load_tokenizer(model)
    by_model = respond(model, tokenizer, prompts_for(tokenizer, config), config)
    groups = by_model.groups
    if task.gold is None:
        return {"reward": by_model}
    utilities = torch.tensor(task.gold(*texts(groups)), dtype=torch.float64).view(len(groups), -1)
    return {"reward": by_model, "gold": Responses(groups, utilities)}
