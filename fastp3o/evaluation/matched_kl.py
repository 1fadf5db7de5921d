"""Comparison of runs at equal KL: gains over the start, and confidence intervals for a handful of
paired seeds.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastp3o.errors import UserError
from fastp3o.evaluation.interval import half_width
from fastp3o.run import log
from fastp3o.run.names import EVALUATIONS

# The evaluations of one run, each a line of its file: update (step), mean reward and KL with
# deviations, prompts.
Evaluations = list[dict[str, float]]
Seed = tuple[str, int]  # task and seed, which are the same for paired runs
Gains = Mapping[Seed, float | None]


class Estimate(NamedTuple):
    """The mean of `count` values and its 95% interval, infinite if no two values are of one task."""

    mean: float
    low: float
    high: float
    count: int  # type: ignore[assignment]  # of values; it hides the count of equal fields that every tuple has


def read_run(folder: Path) -> Evaluations:
    """The evaluations of a run, in order. Raises ValueError with the file if they are missing, or
    lack a metric.
    """
    path = folder / EVALUATIONS
    evaluations = list(log.read(path))
    if not evaluations:
        raise UserError(
            f"{path} has no evaluations: give the folder of a P3O run with evaluations (--eval_prompts)"
        )
    for evaluation in evaluations:
        if (
            missing := {"step", "reward", "kl", "reward_std", "kl_std", "prompts"}
            - evaluation.keys()
        ):
            lacks = f"{path} lacks {', '.join(sorted(missing))} at step {evaluation['step']}"
            remedy = ": where the loss has no KL, a run reports one if --reference names a model"
            raise UserError(lacks + (remedy if "kl" in missing else ""))
    return evaluations


def gain_at_kl(evaluations: Evaluations, kl: float, metric: str = "reward") -> float | None:
    """Gain in `metric` over the evaluation at step 0 when the run first reaches `kl` (nats per
    response).

    The gain is interpolated linearly between the two evaluations around the crossing. It is None if
    the run never reaches `kl`, or reaches it by its first evaluation after step 0: a gain
    interpolated from the start would not be measured. Raises ValueError without an evaluation at
    step 0.
    """
    if not evaluations or evaluations[0]["step"] != 0:
        raise UserError("gains need the evaluation at step 0 first")
    crossing = next((i for i, evaluation in enumerate(evaluations) if evaluation["kl"] >= kl), 0)
    if crossing < 2:
        return None
    before, after = evaluations[crossing - 1], evaluations[crossing]
    share = (kl - before["kl"]) / (after["kl"] - before["kl"])
    return before[metric] + share * (after[metric] - before[metric]) - evaluations[0][metric]


def interval(values: Gains) -> Estimate | None:
    """Mean over the seeds that have a value, and Student's interval from the variance in tasks;
    None if none has.
    """
    by_task: dict[str, list[float]] = {}
    for (task, _), value in values.items():
        if value is not None:
            by_task.setdefault(task, []).append(value)
    known = [np.array(one) for one in by_task.values()]
    if not known:
        return None
    errors = np.concatenate([one - one.mean() for one in known])
    mean, half = float(np.concatenate(known).mean()), half_width(errors, len(errors) - len(known))
    return Estimate(mean, mean - half, mean + half, len(errors))


def paired_difference(first: Gains, second: Gains) -> Estimate | None:
    """`interval` of first − second over the seeds where both have a value; None if no seed has
    both.
    """
    both = {seed: (value, second.get(seed)) for seed, value in sorted(first.items())}
    return interval(
        {seed: a - b for seed, (a, b) in both.items() if a is not None and b is not None}
    )
