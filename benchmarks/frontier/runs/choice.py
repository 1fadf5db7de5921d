"""The choice of learning rates and other settings from the runs on the selection languages."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from math import isnan, nan

from benchmarks.frontier.runs import equal_kl, stale, tuned_arms
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.records import Records
from fastp3o.evaluation.matched_kl import gain_at_kl

# How much further than a KL a run must get, so that runs on other languages reach it as well.
MARGIN = 1.1


def choose_corrections(records: Records) -> None:
    """Writes each algorithm's correction with the highest reward − BETA KL at its better rate."""
    found = {}
    for algorithm, own in stale.COMPARED:
        ends = {
            (arm.correction, rate): at_the_end(records, tuned_arms.selection_runs(arm, rate))
            for arm in stale.corrected(algorithm, own)
            for rate in tuned_arms.rates_of(arm)[:2]
        }
        found[stale.label(algorithm, own)] = max(ends, key=ends.__getitem__)[0]
    tuned_arms.write(corrections=found)


def choose_rates_of(arms: Callable[[], Iterable[Run]], records: Records) -> None:
    """Writes the rate of each arm with the highest reward − BETA KL."""
    found = {}
    for arm in arms():
        ends = {rate: at_the_end(records, tuned_arms.selection_runs(arm, rate)) for rate in tuned_arms.rates_of(arm)}
        found[arm.name] = max(ends, key=ends.__getitem__)
    tuned_arms.write(rates=found)


def choose_slow_settings(records: Records) -> None:
    """Writes the settings with a run that does not get beyond the highest KL by the margin."""
    final_kl = records.runs.set_index("name")["final_kl"]
    slow = {}
    for algorithm, own in equal_kl.EVERYONE:
        for setting in equal_kl.settings(algorithm, own):
            lowest = min(final_kl[run.name] for run in tuned_arms.selection_runs(setting, setting.learning_rate))
            if lowest < MARGIN * max(equal_kl.KLS):
                slow[setting.name] = lowest
    tuned_arms.write(slow_settings=slow)


def choose_at_equal_kl(records: Records) -> None:
    """Writes the setting of each algorithm with the highest mean proxy gain at each KL, with more updates if it needs
    them. A setting that reaches a KL in no number of updates, or passes it before the first evaluation, has no gain
    there.
    """
    slow, found = equal_kl.slow_settings(), {}
    for algorithm, own in equal_kl.EVERYONE:
        tried = [
            replace(one, updates=equal_kl.MORE_UPDATES) if one.name in slow else one
            for one in equal_kl.settings(algorithm, own)
        ]
        by_kl = found.setdefault(stale.label(algorithm, own), {})
        for kl in equal_kl.KLS:
            gains = {one: mean_gain(records, tuned_arms.selection_runs(one, one.learning_rate), kl) for one in tried}
            known = {one: gain for one, gain in gains.items() if not isnan(gain)}
            if known:
                by_kl[f"{kl:g}"] = asdict(max(known, key=known.__getitem__))
    tuned_arms.write(equal_kl=found)


def mean_gain(records: Records, runs: list[Run], kl: float) -> float:
    """NaN if a run has no gain there."""
    gains = [gain_at_kl(records.histories[run.name], kl) for run in runs]
    return nan if None in gains else sum(gains) / len(gains)


def at_the_end(records: Records, runs: list[Run]) -> float:
    """Mean reward − BETA KL of some runs' last evaluations. KeyError if one is not recorded."""
    ends = records.runs.set_index("name")["final_objective"]
    return float(ends.loc[[run.name for run in runs]].mean())
