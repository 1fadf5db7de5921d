"""The choice of learning rates and other settings from the runs on the selection languages."""

from collections.abc import Callable, Iterable

from benchmarks.frontier.runs import stale, tuned_arms
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.records import Records


def choose_corrections(records: Records) -> None:
    """Writes each algorithm's correction with the highest reward − BETA KL at its better rate."""
    found = {}
    for algorithm, own in stale.compared(max(stale.LAGS)):
        ends = {
            (arm.correction, rate): at_the_end(records, tuned_arms.selection_runs(arm, rate))
            for arm in stale.corrected(algorithm, own)
            for rate in tuned_arms.rates_of(arm)[:2]
        }
        found[stale.label(algorithm, own)] = max(ends, key=ends.__getitem__)[0]
    tuned_arms.write(corrections=found)


def choose_rates_of(arms: Callable[[], Iterable[Run]], records: Records) -> None:
    """Writes the rate of each arm with the highest reward − BETA KL, of those that ran."""
    found, recorded = {}, set(records.runs["name"])
    for arm in arms():
        tried = {rate: tuned_arms.selection_runs(arm, rate) for rate in tuned_arms.rates_of(arm)}
        ends = {
            rate: at_the_end(records, runs)
            for rate, runs in tried.items()
            if recorded >= {run.name for run in runs}
        }
        if ends:
            found[arm.name] = max(ends, key=ends.__getitem__)
    tuned_arms.write(rates=found)


def at_the_end(records: Records, runs: list[Run]) -> float:
    """Mean reward − BETA KL of some runs' last evaluations. KeyError if one is not recorded."""
    ends = records.runs.set_index("name")["final_objective"]
    return float(ends.loc[[run.name for run in runs]].mean())
