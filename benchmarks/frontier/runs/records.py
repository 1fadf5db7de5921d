"""The recorded runs in two pandas frames."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pandas import DataFrame, Series

from benchmarks.frontier.runs.plan import BETA, LATER, Run
from fastp3o.evaluation.frontier import Evaluations

RUN_FIELDS = (*Run.__dataclass_fields__, "seconds", "sha256")
EVALUATION_FIELDS = (
    *("run", "step", "kl", "reward", "reward_std", "gold", "missing_eos", "prompts"),
    *("seconds", "response_tokens"),
)


@dataclass(frozen=True)
class Records:
    """One row per run and one per evaluation, in recorded order; rewards are divided by their factor.

    runs: name, group (of tasks), the fields of plan.Run, seconds, sha256 (of the final weights), and the results:
        first_kl: KL of the first evaluation after the start, below which no gain is known; NaN without one
        final_step, final_kl, final_missing_eos: values of the last evaluation
        final_reward, final_gold: gains of the last evaluation over the first, NaN without a gold utility
        final_objective: reward_gain − BETA KL of the last evaluation, which runs with this KL coefficient maximise
    evaluations: run (its name), step (the update), kl (nats per response), reward and gold (means over prompts), their
        gains over the run's start, reward_gain and gold_gain, objective (reward_gain − BETA KL), reward_std (over
        prompts), missing_eos, prompts, and its cost until then, if recorded: seconds and response_tokens.
    """

    runs: DataFrame
    evaluations: DataFrame

    @cached_property
    def histories(self) -> dict[str, Evaluations]:
        """The evaluations of each run, in the form of `gain_at_kl`."""
        histories: dict[str, Evaluations] = {}
        for evaluation in self.evaluations.to_dict("records"):
            histories.setdefault(evaluation["run"], []).append(evaluation)
        return histories


def load(path: Path) -> Records:
    """Reads a runs.jsonl, which may not exist yet. ValueError if a run was recorded twice."""
    records = to_frames(json.loads(line) for line in read(path).splitlines())
    names = records.runs["name"]
    if names.duplicated().any():
        raise ValueError(f"{path} has two runs {names[names.duplicated()].iloc[0]}")
    return records


def to_frames(lines: Iterable[dict[str, Any]]) -> Records:
    """Records from lines of runs.jsonl: the fields of plan.Run with seconds, sha256, evaluations and costs."""
    lines = [{field: getattr(Run, field) for field in LATER} | line for line in lines]
    names = [Run(**{field: line[field] for field in Run.__dataclass_fields__}).name for line in lines]
    runs = DataFrame(lines, columns=list(RUN_FIELDS))
    runs.insert(0, "name", Series(names, dtype=object))
    runs.insert(1, "group", runs["task"].map(lambda task: task.rpartition("-")[0]))
    evaluations = DataFrame(
        [{"run": name} | one for name, line in zip(names, lines, strict=True) for one in evaluations_of(line)],
        columns=list(EVALUATION_FIELDS),
    )
    by_run = evaluations.groupby("run", sort=False)
    for outcome in ("reward", "gold"):
        evaluations[f"{outcome}_gain"] = evaluations[outcome] - by_run[outcome].transform("first")
    evaluations["objective"] = evaluations["reward_gain"] - BETA * evaluations["kl"]
    return Records(runs.join(ends(evaluations), on="name"), evaluations)


def evaluations_of(line: dict[str, Any]) -> list[dict[str, float]]:
    """Evaluations with their costs, and rewards divided by their factor."""
    factor, costs = line["reward_factor"], line.get("costs", {})
    return [
        evaluation
        | {name: evaluation[name] / factor for name in ("reward", "reward_std") if name in evaluation}
        | {name: values[number] for name, values in costs.items()}
        for number, evaluation in enumerate(line.get("evaluations", []))
    ]


def ends(evaluations: DataFrame) -> DataFrame:
    """The results of each run, by its name."""
    by_run = evaluations.groupby("run", sort=False)
    first, last = (by_run.nth(number).set_index("run") for number in (1, -1))
    return DataFrame(
        {
            "first_kl": first["kl"],
            "final_step": last["step"],
            "final_kl": last["kl"],
            "final_missing_eos": last["missing_eos"],
            "final_reward": last["reward_gain"],
            "final_gold": last["gold_gain"],
            "final_objective": last["objective"],
        }
    )


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
