"""Raters who go in circles: what each way to train ends at, by the share of circles."""

from collections.abc import Callable
from typing import Any

from benchmarks.frontier.report.measures import NOT_MEASURED, estimate
from benchmarks.frontier.runs.circles import (
    ARMS,
    AVERAGED,
    DEGREES,
    RECORD,
    SLOW,
    START,
    averaged_name,
)
from benchmarks.frontier.runs.records import lines_of
from fastp3o.evaluation.matched_kl import Seed, paired_difference

Line = dict[str, Any]
Measure = Callable[[Line, str], float]  # of a line of the record and a policy's name
ON_SCORES = next(iter(ARMS))
MEANS, PAIRS = "comparisons, P3O by means", "comparisons, P3O by pairs"
COMPARED = (
    (MEANS, ON_SCORES),
    (PAIRS, ON_SCORES),
    (PAIRS, MEANS),
    ("comparisons, Nash-MD", MEANS),
    ("comparisons, online IPO", MEANS),
    (SLOW, MEANS),
    *((averaged_name(name), name) for name in AVERAGED),
)


def table() -> list[list[str]]:
    """A line a policy and degree that has run, means over languages. Header first."""
    rows = [
        [
            "circles",
            "policy",
            "KL",
            "against the start",
            f"against {ON_SCORES}",
            "worst case",
            "largest style",
        ]
    ]
    for degree in sorted(DEGREES):
        lines = [line for line in lines_of(RECORD) if line["degree"] == degree]
        for name in (START, *ARMS, *map(averaged_name, AVERAGED)) if lines else ():
            moved = f"{mean(lines, kl, name):.1f}" if name in ARMS else NOT_MEASURED
            measures = (against_start, against_scores, worst_case, largest_style)
            measured = (f"{mean(lines, measure, name):.2f}" for measure in measures)
            rows.append([f"{degree:g}", name, moved, *measured])
    return rows


def differences() -> list[list[str]]:
    """A line a degree and pair of policies: paired differences over languages with Student's
    interval of 95%. Header first.
    """
    rows = [["circles", "policies", "worst case", "win rate against the start"]]
    for degree in sorted(DEGREES):
        lines = [line for line in lines_of(RECORD) if line["degree"] == degree]
        for first, second in COMPARED if lines else ():
            measures = [
                estimate(
                    paired_difference(*(by_language(lines, of, name) for name in (first, second))),
                    signed=True,
                )
                for of in (worst_case, against_start)
            ]
            rows.append([f"{degree:g}", f"{first} − {second}", *measures])
    return rows


def by_language(lines: list[Line], measure: Measure, name: str) -> dict[Seed, float]:
    return {("", line["seed"]): measure(line, name) for line in lines}


def mean(lines: list[Line], measure: Measure, name: str) -> float:
    return sum(measure(line, name) for line in lines) / len(lines)


def kl(line: Line, name: str) -> float:
    return line["ended"][name]["kl"]


def worst_case(line: Line, name: str) -> float:
    return line["worst_case"][name]


def against_start(line: Line, name: str) -> float:
    return line["win_rates"][name][START]


def against_scores(line: Line, name: str) -> float:
    return line["win_rates"][name][ON_SCORES]


def largest_style(line: Line, name: str) -> float:
    return line["largest_style"][name]


def accuracy(line: Line, kind: str) -> float:
    """Of a kind of reward model, by held-out pairs."""
    return line["reward_models"][kind]["accuracy"]


def reward_models() -> list[list[str]]:
    """A line a degree that has run: the held-out accuracy of both kinds. Header first."""
    rows = [["circles", "languages", "accuracy of scores", "of comparisons", "of the truth"]]
    for degree in sorted(DEGREES):
        lines = [line for line in lines_of(RECORD) if line["degree"] == degree]
        if lines:
            of_kinds = [mean(lines, accuracy, kind) for kind in ("scores", "comparisons")]
            agreed = sum(line["raters_agree"] for line in lines) / len(lines)
            shares = (f"{value:.2f}" for value in (*of_kinds, agreed))
            rows.append([f"{degree:g}", str(len(lines)), *shares])
    return rows
