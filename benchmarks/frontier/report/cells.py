"""How figures are written in tables."""

import math

from benchmarks.frontier.records import Record, by_task
from benchmarks.goals import NOT_MEASURED
from fastp3o.evaluation.matched_kl import Estimate, Seed, interval

NOT_REACHED = "not reached"


def number(value: float, *, signed: bool = False) -> str:
    """Two decimals, with a proper minus."""
    return (f"{value:+z.2f}" if signed else f"{value:z.2f}").replace("-", "−")


def estimate(found: Estimate | None, *, signed: bool = False, absent: str = NOT_MEASURED) -> str:
    """`mean [low, high] (seeds)`; without the interval where the seeds are too few for one."""
    if found is None:
        return absent
    limits = within(found.low, found.high, signed=signed)
    return f"{number(found.mean, signed=signed)}{limits} ({found.count})"


def within(low: float, high: float, *, signed: bool = False) -> str:
    return f" [{number(low, signed=signed)}, {number(high, signed=signed)}]" if math.isfinite(low) else ""


def level(values: dict[Seed, float | None], *, signed: bool = False) -> str:
    """Mean and interval of what runs have; runs without a value do not count."""
    strata = by_task(values)
    if not any(strata):
        return NOT_REACHED if values else NOT_MEASURED
    return estimate(interval(strata), signed=signed)


def span(values: list[float]) -> str:
    """Smallest and largest."""
    ends = dict.fromkeys(number(end) for end in (min(values), max(values))) if values else [NOT_MEASURED]
    return "–".join(ends)


def first_kl(runs: list[Record]) -> str:
    """Of the first evaluation after the start: below it no gain is known."""
    return span([run["evaluations"][1]["kl"] for run in runs if len(run["evaluations"]) > 1])


def rate(value: float | None) -> str:
    """3e-4 rather than 0.0003 or 3e-04."""
    if value is None:
        return NOT_MEASURED
    digits, exponent = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"
