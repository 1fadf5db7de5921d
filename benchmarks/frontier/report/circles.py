"""Raters who go in circles: what each way to train ends at, by the share of circles."""

from collections.abc import Callable
from typing import Any

from benchmarks.frontier.report.measures import NOT_MEASURED, estimate
from benchmarks.frontier.runs.circles import (
    ARMS,
    AVERAGED,
    DEGREES,
    SLOW,
    START,
    averaged_name,
    recorded,
)
from fastp3o.evaluation.matched_kl import Seed, paired_difference

Line = dict[str, Any]
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
        lines = [line for line in recorded() if line["degree"] == degree]
        for name in (START, *ARMS, *map(averaged_name, AVERAGED)) if lines else ():
            trained = name in ARMS
            moved = (
                f"{mean(lines, lambda line, of=name: line['ended'][of]['kl']):.1f}"
                if trained
                else NOT_MEASURED
            )
            measured: list[Callable[[Line], float]] = [
                lambda line, of=name: line["win_rates"][of][START],
                lambda line, of=name: line["win_rates"][of][ON_SCORES],
                lambda line, of=name: line["worst_case"][of],
                lambda line, of=name: line["largest_style"][of],
            ]
            rows.append(
                [
                    f"{degree:g}",
                    name,
                    moved,
                    *(f"{mean(lines, measure):.2f}" for measure in measured),
                ]
            )
    return rows


def differences() -> list[list[str]]:
    """A line a degree and pair of policies: paired differences over languages with Student's
    interval of 95%. Header first.
    """
    rows = [["circles", "policies", "worst case", "win rate against the start"]]
    for degree in sorted(DEGREES):
        lines = [line for line in recorded() if line["degree"] == degree]
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


def by_language(
    lines: list[Line], measure: Callable[[Line, str], float], name: str
) -> dict[Seed, float]:
    return {("", line["seed"]): measure(line, name) for line in lines}


def worst_case(line: Line, name: str) -> float:
    return line["worst_case"][name]


def against_start(line: Line, name: str) -> float:
    return line["win_rates"][name][START]


def reward_models() -> list[list[str]]:
    """A line a degree that has run: the held-out accuracy of both kinds. Header first."""
    rows = [["circles", "languages", "accuracy of scores", "of comparisons", "of the truth"]]
    for degree in sorted(DEGREES):
        lines = [line for line in recorded() if line["degree"] == degree]
        if lines:
            of_kind = [
                mean(lines, lambda line, kind=kind: line["reward_models"][kind]["accuracy"])
                for kind in ("scores", "comparisons")
            ]
            agreed = mean(lines, lambda line: line["raters_agree"])
            rows.append(
                [f"{degree:g}", str(len(lines)), *(f"{value:.2f}" for value in (*of_kind, agreed))]
            )
    return rows


def mean(lines: list[Line], measure: Callable[[Line], float]) -> float:
    return sum(map(measure, lines)) / len(lines)
