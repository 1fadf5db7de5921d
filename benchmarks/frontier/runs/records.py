"""The recorded runs in two pandas frames, and records of a line a run."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pandas import DataFrame, Series

from benchmarks.frontier.runs.plan import BETA, LATER, Run
from fastp3o.evaluation.matched_kl import Evaluations

RUN_FIELDS = (*Run.__dataclass_fields__, "sha256")
EVALUATION_FIELDS = ("run", "step", "kl", "reward", "gold")


@dataclass(frozen=True)
class Records:
    """One row per run and one per evaluation, in recorded order; rewards are divided by their
    factor.

    runs: name, the fields of plan.Run, sha256 (of the final weights), and of the last evaluation
        final_kl and final_objective, which runs with this KL coefficient maximize
    evaluations: run (its name), step (the update), kl (nats per response), reward and gold (means
        over prompts), and objective: the reward's gain over the run's start − BETA KL
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
    records = to_frames(map(json.loads, path.read_text().splitlines() if path.exists() else ()))
    names = records.runs["name"]
    if names.duplicated().any():
        raise ValueError(f"{path} has two runs {names[names.duplicated()].iloc[0]}")
    return records


def to_frames(lines: Iterable[dict[str, Any]]) -> Records:
    """Records from lines of runs.jsonl: the fields of plan.Run with sha256 and evaluations."""
    lines = [{field: getattr(Run, field) for field in LATER} | line for line in lines]
    names = [
        Run(**{field: line[field] for field in Run.__dataclass_fields__}).name for line in lines
    ]
    runs = DataFrame(lines, columns=list(RUN_FIELDS))
    runs.insert(0, "name", Series(names, dtype=object))
    evaluations = DataFrame(
        [
            one | {"run": name, "reward": one["reward"] / line["reward_factor"]}
            for name, line in zip(names, lines, strict=True)
            for one in line.get("evaluations", [])
        ],
        columns=list(EVALUATION_FIELDS),
    )
    start = evaluations.groupby("run", sort=False)["reward"].transform("first")
    evaluations["objective"] = evaluations["reward"] - start - BETA * evaluations["kl"]
    last = evaluations.groupby("run", sort=False).nth(-1).set_index("run")
    return Records(
        runs.join(last[["kl", "objective"]].add_prefix("final_"), on="name"), evaluations
    )


def lines_of(record: Path) -> list[dict[str, Any]]:
    """The lines of a record, none if it does not exist yet."""
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def add_line(record: Path, line: dict[str, Any]) -> None:
    with record.open("a") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")
