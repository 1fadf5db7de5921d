"""How figures are written in tables."""

import math

from pandas import DataFrame, Series

from benchmarks.frontier.runs.records import by_task
from benchmarks.goals import NOT_MEASURED
from fastp3o.evaluation.matched_kl import Estimate, interval

NOT_REACHED = "not reached"


def number(value: float, *, signed: bool = False) -> str:
    """Two decimals, with a proper minus."""
    return (f"{value:+z.2f}" if signed else f"{value:z.2f}").replace("-", "−")


def estimate(found: Estimate | None, *, signed: bool = False) -> str:
    """`mean [low, high] (seeds)`; without the interval where the seeds are too few for one."""
    if found is None:
        return NOT_MEASURED
    limits = within(found.low, found.high, signed=signed)
    return f"{number(found.mean, signed=signed)}{limits} ({found.count})"


def within(low: float, high: float, *, signed: bool = False) -> str:
    return f" [{number(low, signed=signed)}, {number(high, signed=signed)}]" if math.isfinite(low) else ""


def mean(values: Series) -> str:
    """Mean and interval of what runs have, by task and seed; runs without a value do not count."""
    if values.empty:
        return NOT_MEASURED
    return NOT_REACHED if values.isna().all() else estimate(interval(by_task(values)))


def means(runs: DataFrame, columns: list[str]) -> list[str]:
    return [mean(runs[column]) for column in columns]


def extent(values: Series) -> str:
    """Smallest and largest."""
    if values.isna().all():
        return NOT_MEASURED
    return "–".join(dict.fromkeys([number(values.min()), number(values.max())]))


def rate(value: float | None) -> str:
    """3e-4 rather than 0.0003 or 3e-04."""
    if value is None:
        return NOT_MEASURED
    digits, exponent = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"
