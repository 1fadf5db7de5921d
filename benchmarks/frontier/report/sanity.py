"""Evaluations that no policy can have had: gains above the best that is possible at their KL."""

from typing import NamedTuple

import numpy as np

from benchmarks.frontier.records import Record, name_of
from fastp3o.evaluation.frontier import standard_error
from fastp3o.evaluation.matched_kl import gains

Optimum = dict[str, list[dict[str, float]]]  # task -> points of kl (nats per response), reward_gain and ess
SMALLEST_ESS = 30
ERRORS = 2  # standard errors by which an evaluation may lie above


class Excess(NamedTuple):
    run: str
    step: int
    kl: float
    errors: float  # standard errors above the optimum


def above_optimum(runs: list[Record], optimum: Optimum) -> tuple[int, list[Excess]]:
    """How many evaluations could be held against the optimum, and those that lie above it.

    The optimum is known between its points with an effective sample size of SMALLEST_ESS; nothing else is compared.
    """
    compared, found = 0, []
    errors = standard_errors(runs)
    for run in runs:
        points = sorted((p["kl"], p["reward_gain"]) for p in optimum.get(run["task"], []) if p["ess"] >= SMALLEST_ESS)
        if not points or run["task"] not in errors:
            continue
        kls, best = zip(*points, strict=True)
        for evaluation in gains(run["evaluations"])[1:]:
            kl = evaluation["kl"]
            if not kls[0] <= kl <= kls[-1]:
                continue
            compared += 1
            excess = (evaluation["reward"] - np.interp(kl, kls, best)) / errors[run["task"]]
            if excess > ERRORS:
                found.append(Excess(name_of(run), int(evaluation["step"]), kl, float(excess)))
    return compared, found


def standard_errors(runs: list[Record]) -> dict[str, float]:
    """Of a mean reward, by task: from runs without an offset, whose spread over prompts cancels in gains."""
    of_task: dict[str, list[float]] = {}
    for run in runs:
        if run["offset"] == "none":
            of_task.setdefault(run["task"], []).extend(standard_error(e, "reward") for e in run["evaluations"])
    return {task: float(np.mean(errors)) for task, errors in of_task.items()}
