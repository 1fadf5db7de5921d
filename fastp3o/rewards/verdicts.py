"""Verdicts on two responses, and a file that keeps them, so that none is paid for twice."""

import json
import os
import threading
from collections.abc import Iterable
from enum import StrEnum
from math import isnan
from pathlib import Path
from typing import Any

from fastp3o.errors import UserError
from fastp3o.files import append, lines


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


def verdict_of(preferred: float) -> Verdict:
    """The verdict of P(the first is better); NONE of NaN."""
    if isnan(preferred):
        return Verdict.NONE
    return Verdict.TIE if preferred == 0.5 else Verdict.FIRST if preferred > 0.5 else Verdict.SECOND


# Tells an unfinished line of this file from the last line of another file.
LINE_START = b'{"key": "'


class VerdictFile:
    """Verdicts by key, and P(the first is better) where the judge gave probabilities. Each is
    written as a JSON line as soon as it is known; without a path they stay in memory. The file is
    made with its first line. An unfinished last line, left by a process that was stopped while
    writing, is removed: that comparison has no verdict yet.

    others: files of other processes, which are read as well. Raises ValueError naming file and line
    if a file holds anything else.
    """

    def __init__(self, path: Path | None, others: Iterable[Path] = ()):
        self.path = path
        self.lock = threading.Lock()
        self.verdicts: dict[str, Verdict] = {}
        self.preferred: dict[str, float] = {}
        for other in others:
            self.read(other)
        if path is not None and (unfinished := self.read(path)):
            os.truncate(path, path.stat().st_size - unfinished)

    def read(self, path: Path) -> int:
        """Takes the verdicts of a file; returns the bytes of its unfinished last line."""
        for number, line in enumerate(lines(path), start=1):
            if not line.endswith(b"\n") and line.startswith(LINE_START[: len(line)]):
                return len(line)
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it lacks its end")
                record = json.loads(line)
                self.verdicts[record["key"]] = Verdict(record["verdict"])
                if "preferred" in record:
                    self.preferred[record["key"]] = float(record["preferred"])
            except (ValueError, LookupError, TypeError) as error:
                expected = "a JSON object with 'key' and 'verdict', as a judge writes them"
                raise UserError(f"{path} line {number}: expected {expected} ({error!r})") from error
        return 0

    def add(
        self, key: str, verdict: Verdict, answers: list[str], preferred: float | None = None
    ) -> None:
        """Keeps a verdict. answers: the judge's own words, which the file shows to its readers."""
        record: dict[str, Any] = {"key": key, "verdict": verdict, "answers": answers}
        record |= {} if preferred is None else {"preferred": preferred}
        with self.lock:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                append(self.path, [record])
            self.verdicts[key] = verdict
            if preferred is not None:
                self.preferred[key] = preferred
