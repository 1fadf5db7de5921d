"""How numbers and tables of differences are written."""

import math
from collections.abc import Callable, Iterator

from pandas import DataFrame, Series

from benchmarks.frontier.runs.records import by_task
from benchmarks.goals import NOT_MEASURED
from fastp3o.evaluation.matched_kl import Estimate, discoveries, interval

NOT_REACHED = "not reached"

# The paired differences of each row, keyed by the row's first cells; None: not measured.
Differences = dict[tuple[str, ...], list[Estimate | None]]


def number(value: float, *, signed: bool = False) -> str:
    """Two decimals, with a proper minus."""
    return (f"{value:+z.2f}" if signed else f"{value:z.2f}").replace("-", "−")


def estimate(found: Estimate | None, *, signed: bool = False) -> str:
    """`mean [low, high] (seeds)`, without the interval if there are too few seeds for one."""
    if found is None:
        return NOT_MEASURED
    limits = within(found.low, found.high, signed=signed)
    return f"{number(found.mean, signed=signed)}{limits} ({found.count})"


def within(low: float, high: float, *, signed: bool = False) -> str:
    return f" [{number(low, signed=signed)}, {number(high, signed=signed)}]" if math.isfinite(low) else ""


def mean(values: Series) -> str:
    """Mean and interval of one value a run, indexed by task and seed. Runs without a value are left out."""
    if values.empty:
        return NOT_MEASURED
    return NOT_REACHED if values.isna().all() else estimate(interval(by_task(values)))


def means(runs: DataFrame, columns: list[str]) -> list[str]:
    return [mean(runs[column]) for column in columns]


def extent(values: Series) -> str:
    """`smallest–largest`."""
    if values.isna().all():
        return NOT_MEASURED
    return "–".join(dict.fromkeys([number(values.min()), number(values.max())]))


def rate(value: float | None) -> str:
    """3e-4 rather than 0.0003 or 3e-04."""
    if value is None:
        return NOT_MEASURED
    digits, exponent = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def difference_table(header: list[str], differences: Callable[[int], Differences]) -> tuple[list[list[str]], int]:
    """The table, header first, and how many intervals it has.

    Each interval is shown alone, and widened so that all of the table hold together: `differences` takes their number.
    A star marks what is found at a false discovery rate of 5% over the table.
    """
    single = differences(1)
    shown = [one for row in single.values() for one in row if one is not None]
    found = iter(discoveries([one.p_value for one in shown]))
    rows = [
        [*label, *(judged(*pair, found) for pair in zip(row, wide, strict=True))]
        for (label, row), wide in zip(single.items(), differences(len(shown)).values(), strict=True)
    ]
    return [header, *rows], len(shown)


def judged(single: Estimate | None, together: Estimate | None, found: Iterator[bool]) -> str:
    """`mean [low, high], together [low, high]* (seeds)`."""
    if single is None or together is None:
        return NOT_MEASURED
    star = "*" if next(found) else ""
    alone, all_hold = (within(one.low, one.high, signed=True) for one in (single, together))
    limits = f"{alone}, together{all_hold}" if alone and all_hold else alone
    return f"{number(single.mean, signed=True)}{limits}{star} ({single.count})"
