"""Policies head to head on the evaluation prompts, by the reward model and by the utility behind it.

Twice: as the runs ended, each at its own KL, and each where its run reached one KL. The second models are trained
again up to there, which gives the same bits as the runs had.
"""

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.frontier.plan import Run, group_of, main
from benchmarks.frontier.records import Record, by_task, name_of
from benchmarks.frontier.runs import record_of
from benchmarks.frontier.tasks import ROLLOUTS, Task
from fastp3o.evaluation.matched_kl import gain_at_kl, interval
from fastp3o.evaluation.win_rates.head_to_head import Responses, WinRateConfig, by_reward, prompts_for, respond
from fastp3o.evaluation.win_rates.rates import win_rate
from fastp3o.models.loading import load_tokenizer

FIRST = "joint"
START = "sft"
# Nats per response. Win rates on the docstrings are too near to one half for a KL to matter.
EQUAL_KL = {"languages": 4.0}


class Player(NamedTuple):
    model: str
    kl: float  # of its last evaluation, nats per response


def as_they_ended(group: str, folder: Path, records: Iterable[Record]) -> dict[Run, Player]:
    """The models of the main runs, which `folder` holds."""
    return {run: Player(model_of(run, folder), last_kl(record)) for run, record in recorded(group, records).items()}


def at_equal_kl(
    pool: Executor, group: str, tasks: dict[str, Task], folder: Path, records: Iterable[Record]
) -> dict[Run, Player]:
    """Models of the main runs where they reached EQUAL_KL, trained again in a folder of their own."""
    stopped = folder / "at_equal_kl"
    updates = {run: update_at(record, EQUAL_KL[group]) for run, record in recorded(group, records).items()}
    futures = {run: pool.submit(record_of, run, tasks[run.task], stopped, update) for run, update in updates.items()}
    return {run: Player(model_of(run, stopped), last_kl(future.result())) for run, future in futures.items()}


def recorded(group: str, records: Iterable[Record]) -> dict[Run, Record]:
    of_name = {name_of(record): record for record in records}
    return {run: of_name[run.name] for run in main(group)}


def update_at(record: Record, kl: float) -> int:
    """The update nearest to where the run first gets `kl` nats away. ValueError if not between two evaluations."""
    update = gain_at_kl(record["evaluations"], kl, of="step")
    if update is None:
        raise ValueError(f"{name_of(record)}: no evaluation reached KL {kl:g} after the first one")
    return round(update)


def model_of(run: Run, folder: Path) -> str:
    return str(folder / run.name / "model")


def last_kl(record: Record) -> float:
    return record["evaluations"][-1]["kl"]


def win_rates(
    pool: Executor, tasks: dict[str, Task], players: dict[Run, Player], equal_kl: float | None
) -> list[dict[str, Any]]:
    """Joint clipping against every other algorithm and the start of all: means over seeds with their intervals.

    first_kl, second_kl: means of the players' KLs, in nats per response. equal_kl: where all were stopped, None if
    nowhere.
    """
    of_seeds: dict[tuple[str, int], dict[Run, Player]] = defaultdict(dict)
    for run, player in players.items():
        of_seeds[run.task, run.seed][run] = player
    futures = {seed: pool.submit(of_seed, runs, tasks[seed[0]]) for seed, runs in of_seeds.items()}
    found = {seed: future.result() for seed, future in futures.items()}
    kls = mean_kls(players)
    rows = []
    for second, by in dict.fromkeys(key for rates in found.values() for key in rates):
        rate = interval(by_task({seed: rates[second, by] for seed, rates in found.items()}))
        rows.append(
            {"task": group_of(next(iter(tasks))), "equal_kl": equal_kl, "first": FIRST, "second": second, "by": by}
            | {"seeds": rate.count, "first_kl": kls[FIRST], "second_kl": kls[second]}
            | {"win_rate": rate.mean, "low": rate.low, "high": rate.high}
        )
    return rows


def mean_kls(players: dict[Run, Player]) -> dict[str, float]:
    kls: dict[str, list[float]] = defaultdict(list, {START: [0.0]})
    for run, player in players.items():
        kls[run.algorithm].append(player.kl)
    return {name: sum(values) / len(values) for name, values in kls.items()}


def of_seed(players: dict[Run, Player], task: Task) -> dict[tuple[str, str], float]:
    """Win rates of joint clipping by rival and by reward ("reward", and "gold" where the utility is known)."""
    seed = next(iter(players)).seed
    models = {run.algorithm: player.model for run, player in players.items()} | {START: task.policy}
    responses = {name: responses_of(model, task, seed) for name, model in models.items()}
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
        max_response_tokens=settings["max_response_tokens"],
        eval_samples=settings["eval_samples"],
        seed=seed,
    )
    tokenizer = load_tokenizer(model)
    by_model = respond(model, tokenizer, prompts_for(tokenizer, config), config)
    rollouts = by_model.rollouts
    if task.gold is None:
        return {"reward": by_model}
    return {"reward": by_model, "gold": Responses(rollouts, task.gold(rollouts.prompts, rollouts.responses))}
