"""Comparison of runs at equal KL: gains over the start, and confidence intervals for a handful of paired seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastp3o.errors import UserError
from fastp3o.evaluation.interval import half_width
from fastp3o.run import log
from fastp3o.run.names import EVALUATIONS

# The evaluations of one run, each a line of its file: update (step), mean reward and KL with deviations, prompts.
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
    """The evaluations of a run, in order. Raises ValueError with the file if they are missing, or lack a metric."""
    path = folder / EVALUATIONS
    evaluations = list(log.read(path))
    if not evaluations:
        raise UserError(f"{path} has no evaluations: give the folder of a P3O run with evaluations (--eval_prompts)")
    for evaluation in evaluations:
        if missing := {"step", "reward", "kl", "reward_std", "kl_std", "prompts"} - evaluation.keys():
            raise UserError(f"{path} lacks {', '.join(sorted(missing))} at step {evaluation['step']}")
    return evaluations


def gain_at_kl(evaluations: Evaluations, kl: float, metric: str = "reward") -> float | None:
    """Gain in `metric` over the evaluation at step 0 when the run first reaches `kl` (nats per response).

    The gain is interpolated linearly between the two evaluations around the crossing. It is None if the run never
    reaches `kl`, or reaches it by its first evaluation after step 0: a gain interpolated from the start would not be
    measured. Raises ValueError without an evaluation at step 0.
    """
    if not evaluations or evaluations[0]["step"] != 0:
        raise UserError("gains need the evaluation at step 0 first")
    crossing = next((i for i, evaluation in enumerate(evaluations) if evaluation["kl"] >= kl), 0)
    if crossing < 2:
        return None
    before, after = evaluations[crossing - 1], evaluations[crossing]
    share = (kl - before["kl"]) / (after["kl"] - before["kl"])
    return before[metric] + share * (after[metric] - before[metric]) - evaluations[0][metric]


def passed_at_once(evaluations: Evaluations, kl: float) -> bool:
    """Whether the run reached `kl` by its first evaluation after step 0, too early for `gain_at_kl`."""
    return any(evaluation["kl"] >= kl for evaluation in evaluations[:2])


def interval(strata: Sequence[Sequence[float]]) -> Estimate:
    """Mean of all values, with Student's 95% interval from the variance within strata (here a task with its seeds)."""
    samples = [np.asarray(stratum, dtype=float) for stratum in strata if len(stratum)]
    errors = np.concatenate([sample - sample.mean() for sample in samples])
    mean, half = float(np.concatenate(samples).mean()), half_width(errors, len(errors) - len(samples))
    return Estimate(mean, mean - half, mean + half, len(errors))


def seeds_interval(values: Gains) -> Estimate | None:
    """`interval` over the seeds that have a value, by task; None if none has one."""
    strata: dict[str, list[float]] = {}
    for (task, _), value in values.items():
        if value is not None:
            strata.setdefault(task, []).append(value)
    return interval(list(strata.values())) if strata else None


def paired_difference(first: Gains, second: Gains) -> Estimate | None:
    """Mean of first − second over the seeds where both have a value, by task; None if no seed has both."""
    both = {seed: (value, second.get(seed)) for seed, value in sorted(first.items())}
    differences = {seed: one - other for seed, (one, other) in both.items() if one is not None and other is not None}
    return seeds_interval(differences)
