"""The win rate that follows from verdicts on pairs of responses, with its interval."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastp3o.errors import UserError
from fastp3o.evaluation.interval import share_interval
from fastp3o.rewards.verdicts import Verdict

POINTS = {Verdict.FIRST: 1.0, Verdict.TIE: 0.5, Verdict.SECOND: 0.0, Verdict.NONE: np.nan}


@dataclass(frozen=True)
class WinRate:
    """Win rate of the first checkpoint against the second.

    win_rate: wins plus half the ties, divided by the comparisons with a verdict; 0.5 is even. low,
    high: its 95% interval over prompts. wins, ties, losses: numbers of comparisons. missing: those
    without a verdict, which count nowhere else. prompts: number of prompts with a verdict.
    length_controlled: the win rate at equal length; None where verdicts and lengths do not
    determine it.
    """

    win_rate: float
    low: float
    high: float
    wins: int
    ties: int
    losses: int
    missing: int
    prompts: int
    length_controlled: float | None = None


def win_rate(verdicts: Sequence[Verdict], *, responses_per_prompt: int = 1) -> WinRate:
    """Win rate from verdicts [P * K], those on the K responses to a prompt adjacent.

    The interval is over prompts, each with all its comparisons: these are not independent of each
    other. Raises ValueError if there is no verdict at all, or their number is not a multiple of
    `responses_per_prompt`.
    """
    if len(verdicts) % responses_per_prompt:
        raise UserError(f"{len(verdicts)} verdicts are not {responses_per_prompt} a prompt")
    count = {verdict: sum(v == verdict for v in verdicts) for verdict in Verdict}
    if count[Verdict.NONE] == len(verdicts):
        raise UserError(f"none of {len(verdicts)} comparisons has a verdict")
    points = np.array([POINTS[verdict] for verdict in verdicts]).reshape(-1, responses_per_prompt)
    judged = (~np.isnan(points)).sum(axis=1)
    points, judged = np.nansum(points, axis=1)[judged > 0], judged[judged > 0]
    low, high = share_interval(points, judged)
    return WinRate(
        win_rate=float(points.sum() / judged.sum()),
        low=low,
        high=high,
        wins=count[Verdict.FIRST],
        ties=count[Verdict.TIE],
        losses=count[Verdict.SECOND],
        missing=count[Verdict.NONE],
        prompts=len(judged),
    )
