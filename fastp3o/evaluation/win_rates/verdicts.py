"""The verdict on two responses, and a file that keeps verdicts."""

import json
import os
import threading
from enum import StrEnum
from pathlib import Path

from fastp3o.errors import UserError


class Verdict(StrEnum):
    """FIRST, SECOND: the response that is better. NONE: the judge gave no usable answer."""

    FIRST = "first"
    SECOND = "second"
    TIE = "tie"
    NONE = "none"

    @property
    def swapped(self) -> "Verdict":
        """The same verdict on the same responses in the other order."""
        return {Verdict.FIRST: Verdict.SECOND, Verdict.SECOND: Verdict.FIRST}.get(self, self)


LINE_START = b'{"key": "'  # tells an unfinished line of this file from the last line of some other file


class VerdictFile:
    """Verdicts by key, each written as a JSON line as soon as it is known; without a path they stay in memory.

    Raises ValueError naming file and line where the file holds anything else. An unfinished last line, of a process
    that was stopped while writing, is removed: that comparison has no verdict yet.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.lock = threading.Lock()
        self.verdicts: dict[str, Verdict] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        *lines, unfinished = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                self.verdicts[record["key"]] = Verdict(record["verdict"])
            except (ValueError, LookupError, TypeError) as error:
                raise UserError(
                    f"{path} line {number}: expected a JSON object with 'key' and 'verdict', as a judge writes them "
                    f"({type(error).__name__}: {error})"
                ) from error
        if not unfinished.startswith(LINE_START[: len(unfinished)]):
            raise UserError(f"{path} line {len(lines) + 1}: expected a line as a judge writes them, with its end")
        os.truncate(path, path.stat().st_size - len(unfinished))

    def add(self, key: str, verdict: Verdict, answers: list[str]) -> None:
        """Keeps a verdict. answers: the judge's own words, for people who read the file."""
        line = json.dumps({"key": key, "verdict": verdict, "answers": answers}) + "\n"
        with self.lock:
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(line)
            self.verdicts[key] = verdict
