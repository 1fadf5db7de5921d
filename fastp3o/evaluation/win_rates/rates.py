"""The win rate of one checkpoint's responses against another's, from verdicts or rewards, with its interval."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastp3o.errors import UserError
from fastp3o.evaluation.win_rates.bootstrap import percentile_interval
from fastp3o.evaluation.win_rates.verdicts import Verdict


@dataclass(frozen=True)
class WinRate:
    """Win rate of the first checkpoint against the second.

    win_rate: wins plus half the ties, divided by the comparisons with a verdict; 0.5 is even.
    low, high: its 95% bootstrap interval over prompts.
    wins, ties, losses: numbers of comparisons.
    missing: comparisons without a verdict, which count nowhere else.
    prompts: number of prompts with a verdict.
    """

    win_rate: float
    low: float
    high: float
    wins: int
    ties: int
    losses: int
    missing: int
    prompts: int


def win_rate(verdicts: Sequence[Verdict], *, responses_per_prompt: int = 1, seed: int = 0) -> WinRate:
    """Win rate from verdicts [P * K], those on the K responses to a prompt adjacent.

    The interval resamples prompts, each with all its comparisons: these are not independent of each other.

    Raises ValueError where there is no verdict at all, or their number is no multiple of `responses_per_prompt`.
    """
    if len(verdicts) % responses_per_prompt:
        raise UserError(f"{len(verdicts)} verdicts are not {responses_per_prompt} a prompt")
    count = {verdict: sum(v == verdict for v in verdicts) for verdict in Verdict}
    if count[Verdict.NONE] == len(verdicts):
        raise UserError(f"none of {len(verdicts)} comparisons has a verdict")
    points = np.array([POINTS[verdict] for verdict in verdicts]).reshape(-1, responses_per_prompt)
    judged = (~np.isnan(points)).sum(axis=1)
    points, judged = np.nansum(points, axis=1)[judged > 0], judged[judged > 0]
    low, high = percentile_interval(points, judged, seed=seed)
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


POINTS = {Verdict.FIRST: 1.0, Verdict.TIE: 0.5, Verdict.SECOND: 0.0, Verdict.NONE: np.nan}


def verdicts_of_rewards(firsts: Sequence[float], seconds: Sequence[float]) -> list[Verdict]:
    """The higher reward wins; equal rewards are a tie. Raises ValueError where a reward is not finite."""
    for name, rewards in (("first", firsts), ("second", seconds)):
        broken = np.flatnonzero(~np.isfinite(rewards))
        if len(broken):
            raise UserError(
                f"{len(broken)} of {len(rewards)} rewards of the {name} checkpoint are not finite, that of response "
                f"{broken[0]} to begin with: {rewards[broken[0]]}"
            )
    return [
        Verdict.FIRST if first > second else Verdict.SECOND if second > first else Verdict.TIE
        for first, second in zip(firsts, seconds, strict=True)
    ]
