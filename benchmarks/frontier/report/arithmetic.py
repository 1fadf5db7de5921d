"""Sums: the held-out accuracy of every algorithm, and joint P3O's lead over it."""

from dataclasses import replace

from benchmarks.frontier.report.measures import estimate, name_of, rate
from benchmarks.frontier.runs.arithmetic import (
    FOUND_ON,
    RECORD,
    STARTS,
    accuracies,
    arms,
    chosen_rate,
    found_from,
)
from benchmarks.frontier.runs.records import load
from benchmarks.frontier.runs.settings import FIRST_RATES
from fastp3o.evaluation.matched_kl import interval, paired_difference


def table() -> list[list[str]]:
    """A line an arm that has run. Header first. Rates are found on starts of their own."""
    records = load(RECORD)
    tuned = [replace(one, learning_rate=chosen_rate(records, one) or 0.0) for one in arms()]
    joint = {one.responses_per_prompt: one for one in tuned if one.algorithm == "joint"}
    lines = [["algorithm", "K", "rate", "accuracy", "joint P3O minus it"]]
    for one in [*tuned, *map(found_from, FIRST_RATES)]:
        seeds, responses = FOUND_ON if one.kl_per_update else STARTS, one.responses_per_prompt
        own, of_joint = (accuracies(records, run, seeds) for run in (one, joint[responses]))
        if own:
            name = name_of(one).removesuffix(", k1")  # here without a KL
            lead = (
                ""
                if one is joint[responses]
                else estimate(paired_difference(of_joint, own), signed=True)
            )
            how = (
                f"found from {rate(one.learning_rate)}"
                if one.kl_per_update
                else rate(one.learning_rate)
            )
            lines.append([name, str(responses), how, estimate(interval(own)), lead])
    return lines
