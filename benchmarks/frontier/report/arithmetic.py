"""Sums: the held-out accuracy of every algorithm, and joint P3O's lead over it."""

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.frontier.report.measures import estimate, name_of, rate
from benchmarks.frontier.runs.arithmetic import RECORD, accuracies, arm, arms, chosen_rate
from benchmarks.frontier.runs.records import Records, load
from benchmarks.frontier.runs.settings import FIRST_RATES, KL_PER_UPDATE
from fastp3o.evaluation.matched_kl import Seed, interval, paired_difference


def table() -> list[list[str]]:
    """A line an arm that has run. Header first."""
    records = load(RECORD)
    lines = [["algorithm", "K", "rate", "accuracy", "joint P3O minus it"]]
    for one in arms():
        own_rate = chosen_rate(records, one)
        if own_rate:
            one = replace(one, learning_rate=own_rate)
            name = name_of(one).removesuffix(", k1")  # here without a KL
            lines.append([name, str(one.responses_per_prompt), rate(own_rate), *cells(records, one)])
    for first in FIRST_RATES:
        one = replace(arm("joint", kl_per_update=KL_PER_UPDATE), learning_rate=first)
        lines.append([f"{name_of(one)}, rate found", "4", f"from {rate(first)}", *cells(records, one)])
    return [line for line in lines if line[3]]


def cells(records: Records, one: object) -> list[str]:
    own = by_seed(accuracies(records, one))
    if not own:
        return ["", ""]
    joint = arm("joint", one.responses_per_prompt)
    joint = replace(joint, learning_rate=chosen_rate(records, joint) or 0.0)
    lead = paired_difference(by_seed(accuracies(records, joint)), own)
    return [estimate(interval(own)), "" if one == joint else estimate(lead, signed=True)]


def by_seed(found: Mapping[int, float]) -> dict[Seed, float]:
    return {("", seed): value for seed, value in found.items()}
