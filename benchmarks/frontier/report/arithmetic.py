"""Sums: the held-out accuracy of every algorithm, and joint P3O's lead over it."""

from dataclasses import replace

from benchmarks.frontier.report.measures import estimate, name_of, rate
from benchmarks.frontier.runs.arithmetic import RECORD, accuracies, arm, arms, chosen_rate
from benchmarks.frontier.runs.records import load
from benchmarks.frontier.runs.settings import FIRST_RATES, KL_PER_UPDATE
from fastp3o.evaluation.matched_kl import interval, paired_difference


def table() -> list[list[str]]:
    """A line an arm that has run. Header first."""
    records, found_from = load(RECORD), arm("joint", kl_per_update=KL_PER_UPDATE)
    tuned = [replace(one, learning_rate=chosen_rate(records, one) or 0.0) for one in arms()]
    joint = {one.responses_per_prompt: accuracies(records, one) for one in tuned if one.algorithm == "joint"}
    lines = [["algorithm", "K", "rate", "accuracy", "joint P3O minus it"]]
    for one in [*tuned, *(replace(found_from, learning_rate=first) for first in FIRST_RATES)]:
        own, responses = accuracies(records, one), one.responses_per_prompt
        if own:
            name = name_of(one).removesuffix(", k1")  # here without a KL
            lead = "" if own == joint[responses] else estimate(paired_difference(joint[responses], own), signed=True)
            how = f"found from {rate(one.learning_rate)}" if one.kl_per_update else rate(one.learning_rate)
            lines.append([name, str(responses), how, estimate(interval(own)), lead])
    return lines
