"""The check that no evaluation has a gain above the best that is possible at its KL."""

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from benchmarks.frontier.runs.records import Records
from fastp3o.evaluation.frontier import standard_error

Optimum = dict[str, list[dict[str, float]]]  # task -> points of kl (nats per response), reward_gain and ess
SMALLEST_ESS = 30
ERRORS = 2  # an evaluation may lie above the optimum by this many standard errors


def known_points(optimum: Optimum) -> DataFrame:
    """Task, kl and reward_gain of the points with a sufficient effective sample size, sorted by KL."""
    points = pd.DataFrame(
        [{"task": task} | point for task, curve in optimum.items() for point in curve],
        columns=["task", "kl", "reward_gain", "ess"],
    )
    return points[points["ess"] >= SMALLEST_ESS].sort_values(["task", "kl"])


def held_against_optimum(records: Records, optimum: Optimum) -> DataFrame:
    """The evaluations for which the optimum is known, with `errors`: how far they lie above it, in standard errors.

    The optimum is known between its points with an effective sample size of SMALLEST_ESS; nothing else is compared.
    """
    evaluations = records.evaluations.merge(records.runs[["name", "task"]], left_on="run", right_on="name")
    known, errors = known_points(optimum), standard_errors(records)
    # An empty frame, for records without tasks.
    compared = [evaluations[:0].assign(errors=pd.Series(dtype=float))]
    for task, points in known[known["task"].isin(errors.index)].groupby("task"):
        kls = points["kl"].to_numpy()
        candidates = evaluations[(evaluations["task"] == task) & (evaluations["step"] > 0)]
        inside = candidates[candidates["kl"].between(kls[0], kls[-1])]
        best = np.interp(inside["kl"], kls, points["reward_gain"])
        compared.append(inside.assign(errors=(inside["reward_gain"] - best) / errors[task]))
    return pd.concat(compared)


def above_optimum(compared: DataFrame) -> DataFrame:
    return compared[compared["errors"] > ERRORS]


def standard_errors(records: Records) -> Series:
    """Standard errors of mean rewards by task, from runs without an offset: an offset's spread cancels in gains."""
    plain = records.runs.loc[records.runs["offset"] == "none", ["name", "task"]]
    evaluations = records.evaluations.merge(plain, left_on="run", right_on="name")
    return standard_error(evaluations, "reward").groupby(evaluations["task"]).mean()
