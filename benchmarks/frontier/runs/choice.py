"""The choice of learning rates and other settings from the runs on the selection seeds."""

import json
from collections.abc import Mapping
from typing import TypeVar

from benchmarks.frontier.runs import tuning
from benchmarks.frontier.runs.plan import ALGORITHMS, EVERYONE, KL_COEFS, SETTINGS, Run, chosen_rates, rates
from benchmarks.frontier.runs.records import Records
from benchmarks.frontier.tasks.groups import DOCSTRINGS, LANGUAGES

# Where learning rates are compared, in nats per response, and how much further a run must get, so that others get
# there too.
SELECTION_KL = {LANGUAGES: 4.0, DOCSTRINGS: 0.2}
MARGIN = 1.5
# The same for every KL of the envelope, whose runs are shorter: others get about as far.
ENVELOPE_MARGIN = 1.1

# What of an algorithm is tried: a parameter, or a learning rate with a KL coefficient.
Trial = TypeVar("Trial", float, tuple[float, float])


def choose_rates(group: str, records: Records) -> None:
    """Writes each algorithm's learning rate with the highest mean gain at the selection KL, over its selection runs.

    A rate with which a run does not get beyond that KL, or passes it before the first evaluation, is not chosen: lower
    rates are better at a KL as long as they reach it.
    """
    kl = SELECTION_KL[group]
    runs = records.runs[records.runs["name"].isin([run.name for run in rates(group)])]
    gains = records.at_kl(runs, kl, "reward").where(runs["final_kl"] >= MARGIN * kl)
    # Without a gain in one of its runs a rate has no mean.
    by_rate = gains.groupby([runs["algorithm"], runs["learning_rate"]])
    means = by_rate.agg(lambda values: values.mean(skipna=False)).unstack().reindex(list(ALGORITHMS))
    without = means.index[means.isna().all(axis=1)]
    if len(without):
        raise RuntimeError(f"{group}: no rate of {without[0]} gets beyond KL {kl} in all its runs")
    chosen = means.idxmax(axis=1).to_dict()
    SETTINGS.write_text(json.dumps(chosen_rates() | {group: chosen}, indent=2) + "\n")
    print(f"{group}: learning rates {chosen}")


def choose_own_parameters(group: str, records: Records) -> None:
    """Writes for each algorithm that has one the parameter with the highest mean gain, among its trials."""
    chosen = {}
    for algorithm, values in tuning.OWN_TRIALS.items():
        setting = tuning.TRIAL_RATES[algorithm][0], KL_COEFS[algorithm][tuning.MIDDLE]
        trials = {own: list(tuning.trial(group, algorithm, setting, own)) for own in values}
        chosen[algorithm] = best(records, trials, tuning.OWN_KL)
        if chosen[algorithm] is None:
            raise RuntimeError(f"{group}: no parameter of {algorithm} gets beyond KL {tuning.OWN_KL:g}")
    write_tuned(group, own_parameter=chosen)


def choose_settings(group: str, records: Records) -> None:
    """Writes for each algorithm and KL of the envelope the learning rate and KL coefficient with the highest mean gain
    there, among its trials; none where no trial gets that far.
    """
    chosen: dict[str, dict] = {}
    for algorithm in EVERYONE:
        own = tuning.own_parameter(group, algorithm)
        trials = {
            (rate, kl_coef): list(tuning.trial(group, algorithm, (rate, kl_coef), own))
            for rate in tuning.TRIAL_RATES[algorithm]
            for kl_coef in KL_COEFS[algorithm]
        }
        settings = {kl: best(records, trials, kl) for kl in tuning.ENVELOPE_KLS}
        chosen[algorithm] = {
            f"{kl:g}": dict(zip(("learning_rate", "kl_coef"), setting, strict=True))
            for kl, setting in settings.items()
            if setting is not None
        }
    write_tuned(group, settings={algorithm: settings for algorithm, settings in chosen.items() if settings})


def best(records: Records, trials: Mapping[Trial, list[Run]], kl: float) -> Trial | None:
    """The trial with the highest mean proxy gain at a KL, over the seeds on which all that have run did so.

    A trial of which a run does not get beyond the KL by the margin, or passes it before the first evaluation, is not
    chosen; None if that holds for all.
    """
    recorded = {name: place for place, name in enumerate(records.runs["name"])}
    seeds = [{run.seed for run in runs if run.name in recorded} for runs in trials.values()]
    shared = set.intersection(*filter(None, seeds)) if any(seeds) else set()
    means = {}
    for trial, planned in trials.items():
        runs = records.runs.iloc[[recorded[r.name] for r in planned if r.seed in shared and r.name in recorded]]
        gains = records.at_kl(runs, kl, "reward").where(runs["final_kl"] >= ENVELOPE_MARGIN * kl)
        if len(gains) and gains.notna().all():
            means[trial] = gains.mean()
    return max(means, key=means.__getitem__, default=None)


def write_tuned(group: str, **parts: dict) -> None:
    chosen = tuning.tuned()
    tuning.TUNED.write_text(json.dumps(chosen | {group: chosen.get(group, {}) | parts}, indent=2) + "\n")
    print(f"{group}: {parts}")
