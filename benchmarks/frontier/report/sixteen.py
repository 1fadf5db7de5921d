"""Sixteen responses to a prompt: P3O against GRPO with other clip ranges and KL coefficients, Dr. GRPO and GSPO."""

from benchmarks.frontier.report import many
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.sixteen import groups_of_sixteen

HEADER = ["algorithm", "KL coefficient"]


def arms() -> dict[tuple[str, ...], Run]:
    return {label(one): one for one in groups_of_sixteen()}


def label(one: Run) -> tuple[str, ...]:
    return many.name_of(one), f"{one.kl_coef:g}"


def pairs() -> many.Pairs:
    """Joint P3O at each coefficient against every other algorithm."""
    ours = [one for one in groups_of_sixteen() if one.algorithm == "joint"]
    others = [one for one in groups_of_sixteen() if one.algorithm != "joint"]
    return {(*label(first), described(second)): (first, second) for first in ours for second in others}


def described(one: Run) -> str:
    return "{}, β {}".format(*label(one))
