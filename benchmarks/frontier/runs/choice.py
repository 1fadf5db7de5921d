"""The choice of learning rates and other settings from the runs on the selection seeds."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from itertools import product, starmap
from math import isnan, nan

from benchmarks.frontier.runs import equal_kl, stale, tuned_arms, tuning
from benchmarks.frontier.runs.plan import ALGORITHMS, EVERYONE, KL_COEFS, SETTINGS, Run, chosen_rates, rates
from benchmarks.frontier.runs.records import Records
from benchmarks.frontier.tasks.groups import DOCSTRINGS, LANGUAGES
from fastp3o.evaluation.matched_kl import gain_at_kl

# The KL (nats per response) at which learning rates are compared, and how much further a run must get, so that runs on
# other seeds reach it as well.
SELECTION_KL = {LANGUAGES: 4.0, DOCSTRINGS: 0.2}
MARGIN = 1.5
# The same for every KL of the envelope; its runs are shorter, and get about equally far.
ENVELOPE_MARGIN = 1.1


def choose_rates(group: str, records: Records) -> None:
    """Writes each algorithm's learning rate with the highest mean gain at the selection KL, over its selection runs.

    A rate is not chosen if one of its runs does not get beyond that KL, or passes it before the first evaluation: lower
    rates are better at a KL as long as they reach it.
    """
    kl = SELECTION_KL[group]
    runs = records.runs[records.runs["name"].isin([run.name for run in rates(group)])]
    gains = records.at_kl(runs, kl, "reward").where(runs["final_kl"] >= MARGIN * kl)
    # A rate with a run without a gain has no mean.
    by_rate = gains.groupby([runs["algorithm"], runs["learning_rate"]])
    means = by_rate.agg(lambda values: values.mean(skipna=False)).unstack().reindex(list(ALGORITHMS))
    without = means.index[means.isna().all(axis=1)]
    if len(without):
        raise RuntimeError(f"{group}: no rate of {without[0]} gets beyond KL {kl} in all its runs")
    chosen = means.idxmax(axis=1).to_dict()
    SETTINGS.write_text(json.dumps(chosen_rates() | {group: chosen}, indent=2) + "\n")
    print(f"{group}: learning rates {chosen}")


def choose_own_parameters(group: str, records: Records) -> None:
    """Writes each algorithm's own parameter, if it has one, with the highest mean gain at each KL of the envelope; none
    for a KL that no trial reaches.
    """
    chosen = {}
    for algorithm, values in tuning.OWN_TRIALS.items():
        found = best_by_kl(group, algorithm, records, [tuning.own_trial(algorithm, own) for own in values])
        if not found:
            raise RuntimeError(f"{group}: no parameter of {algorithm} gets beyond KL {tuning.ENVELOPE_KLS[0]:g}")
        chosen[algorithm] = {kl: setting.own_parameter for kl, setting in found.items()}
    write_tuned(group, own_parameters=chosen)


def choose_settings(group: str, records: Records) -> None:
    """Writes each algorithm's setting with the highest mean gain at each KL of the envelope; none for a KL that no
    trial reaches.
    """
    chosen = {}
    for algorithm in EVERYONE:
        tried = starmap(
            tuning.Setting,
            product(tuning.TRIAL_RATES[algorithm], KL_COEFS[algorithm], tuning.OWN_TRIALS.get(algorithm, (0.0,))),
        )
        found = best_by_kl(group, algorithm, records, tried)
        chosen[algorithm] = {kl: setting._asdict() for kl, setting in found.items()}
    write_tuned(group, settings={algorithm: settings for algorithm, settings in chosen.items() if settings})


def best_by_kl(
    group: str, algorithm: str, records: Records, settings: Iterable[tuning.Setting]
) -> dict[str, tuning.Setting]:
    """The best setting for each KL of the envelope that any of them reaches."""
    trials = {setting: list(tuning.trial(group, algorithm, setting)) for setting in settings}
    found = {f"{kl:g}": best(records, trials, kl) for kl in tuning.ENVELOPE_KLS}
    return {kl: setting for kl, setting in found.items() if setting is not None}


def best(records: Records, trials: Mapping[tuning.Setting, list[Run]], kl: float) -> tuning.Setting | None:
    """The setting with the highest mean proxy gain at a KL, over the seeds on which all settings have run.

    A setting is not chosen if one of its runs does not get beyond the KL by the margin, or passes it before the first
    evaluation. None if that holds for all.
    """
    recorded = {name: place for place, name in enumerate(records.runs["name"])}
    seeds = [{run.seed for run in runs if run.name in recorded} for runs in trials.values()]
    shared = set.intersection(*filter(None, seeds)) if any(seeds) else set()
    means = {}
    for setting, planned in trials.items():
        runs = records.runs.iloc[[recorded[r.name] for r in planned if r.seed in shared and r.name in recorded]]
        gains = records.at_kl(runs, kl, "reward").where(runs["final_kl"] >= ENVELOPE_MARGIN * kl)
        if len(gains) and gains.notna().all():
            means[setting] = gains.mean()
    return max(means, key=means.__getitem__, default=None)


def choose_corrections(group: str, records: Records) -> None:
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


def choose_rates_of(arms: Callable[[], Iterable[Run]], group: str, records: Records) -> None:
    """Writes the rate of each arm with the highest reward − BETA KL."""
    found = {}
    for arm in arms():
        ends = {rate: at_the_end(records, tuned_arms.selection_runs(arm, rate)) for rate in tuned_arms.rates_of(arm)}
        found[arm.name] = max(ends, key=ends.__getitem__)
    tuned_arms.write(rates=found)


def choose_slow_settings(group: str, records: Records) -> None:
    """Writes the settings with a run that does not get beyond the highest KL by the margin."""
    final_kl = records.runs.set_index("name")["final_kl"]
    slow = {}
    for algorithm, own in equal_kl.EVERYONE:
        for setting in equal_kl.settings(algorithm, own):
            lowest = min(final_kl[run.name] for run in tuned_arms.selection_runs(setting, setting.learning_rate))
            if lowest < ENVELOPE_MARGIN * max(equal_kl.KLS):
                slow[setting.name] = lowest
    tuned_arms.write(slow_settings=slow)


def choose_at_equal_kl(group: str, records: Records) -> None:
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


def write_tuned(group: str, **parts: dict) -> None:
    chosen = tuning.tuned()
    tuning.TUNED.write_text(json.dumps(chosen | {group: chosen.get(group, {}) | parts}, indent=2) + "\n")
    print(f"{group}: {parts}")
