"""Verdicts on two responses, a file that keeps them, and the win rate that follows from them, with its interval."""

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from fastp3o.errors import UserError
from fastp3o.evaluation.interval import share_interval
from fastp3o.run import log


class Verdict(StrEnum):
    """FIRST, SECOND: the better response. NONE: the judge gave no usable answer."""

    FIRST = "first"
    SECOND = "second"
    TIE = "tie"
    NONE = "none"

    @property
    def swapped(self) -> "Verdict":
        """The same verdict on the same responses in the other order."""
        return {Verdict.FIRST: Verdict.SECOND, Verdict.SECOND: Verdict.FIRST}.get(self, self)


LINE_START = b'{"key": "'  # tells an unfinished line of this file from the last line of another file


class VerdictFile:
    """Verdicts by key, each written as a JSON line as soon as it is known; without a path they stay in memory. Raises
    ValueError naming file and line if the file holds anything else. An unfinished last line, left by a process that was
    stopped while writing, is removed: that comparison has no verdict yet.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.lock = threading.Lock()
        self.verdicts: dict[str, Verdict] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        for number, line in enumerate(log.lines(path), start=1):
            if not line.endswith(b"\n") and line.startswith(LINE_START[: len(line)]):
                os.truncate(path, path.stat().st_size - len(line))
                break
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it lacks its end")
                record = json.loads(line)
                self.verdicts[record["key"]] = Verdict(record["verdict"])
            except (ValueError, LookupError, TypeError) as error:
                expected = "a JSON object with 'key' and 'verdict', as a judge writes them"
                raise UserError(f"{path} line {number}: expected {expected} ({error!r})") from error

    def add(self, key: str, verdict: Verdict, answers: list[str]) -> None:
        """Keeps a verdict. answers: the judge's own words, which the file shows to its readers."""
        with self.lock:
            if self.path is not None:
                log.append(self.path, [{"key": key, "verdict": verdict, "answers": answers}])
            self.verdicts[key] = verdict


POINTS = {Verdict.FIRST: 1.0, Verdict.TIE: 0.5, Verdict.SECOND: 0.0, Verdict.NONE: np.nan}


@dataclass(frozen=True)
class WinRate:
    """Win rate of the first checkpoint against the second.

    win_rate: wins plus half the ties, divided by the comparisons with a verdict; 0.5 is even. low, high: its 95%
    interval over prompts. wins, ties, losses: numbers of comparisons. missing: those without a verdict, which
    count nowhere else. prompts: number of prompts with a verdict.
    """

    win_rate: float
    low: float
    high: float
    wins: int
    ties: int
    losses: int
    missing: int
    prompts: int


def win_rate(verdicts: Sequence[Verdict], *, responses_per_prompt: int = 1) -> WinRate:
    """Win rate from verdicts [P * K], those on the K responses to a prompt adjacent.

    The interval is over prompts, each with all its comparisons: these are not independent of each other. Raises
    ValueError if there is no verdict at all, or their number is not a multiple of `responses_per_prompt`.
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
