"""The choice of learning rates from the runs on the selection seeds."""

import json

from benchmarks.frontier.runs.plan import ALGORITHMS, SETTINGS, chosen_rates, rates
from benchmarks.frontier.runs.records import Records
from benchmarks.frontier.tasks.groups import DOCSTRINGS, LANGUAGES

# Where learning rates are compared, in nats per response, and how much further a run must get, so that others get
# there too.
SELECTION_KL = {LANGUAGES: 4.0, DOCSTRINGS: 0.2}
MARGIN = 1.5


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
