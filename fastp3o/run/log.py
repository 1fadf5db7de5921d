"""Logs of a run: lines of JSON that are appended in the order of their numbers, and never changed.

A process that is killed loses at most the end of the last line.
"""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from fastp3o.files import append as append
from fastp3o.files import from_here, lines, sync, whole_file
from fastp3o.run.names import LOGS

SHOWN = 120  # characters of a prompt


def finite_or_none(value: float) -> float | None:
    """A number as JSON can hold it."""
    return value if math.isfinite(value) else None


def read(path: Path, key: str = "step") -> Iterator[dict[str, Any]]:
    """The records of a log. Damaged lines, such as one that is being written, are left out. key: of
    their numbers.
    """
    return (values for line in lines(path) if (values := record(line, key)))


def record(line: bytes, key: str) -> dict[str, Any] | None:
    """The values of a line; None if it is damaged, lacks its end or has no number."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = line.endswith(b"\n") and isinstance(values, dict) and isinstance(values.get(key), int)
    return values if whole else None


def cut_after(path: Path, last: int, key: str = "step") -> list[str]:
    """Removes the lines after number `last`, which a resumed run writes again, and damaged ones,
    such as the end of a file on a disk that was full. Returns a message for each that is damaged.
    All that belongs to steps up to `last` was synced before the state of that step was.
    """
    numbers = [
        values[key] if values else None for values in (record(line, key) for line in lines(path))
    ]
    kept = [number is not None and number <= last for number in numbers]
    if not all(kept):
        with whole_file(path) as file:
            file.writelines(compress(lines(path), kept))
    damaged = (place for place, number in enumerate(numbers, 1) if number is None)
    return [f"{from_here(path)} line {place} is damaged and left out" for place in damaged]


def sync_logs(folder: Path) -> None:
    """Flushes the logs of a run to the disk."""
    for path in (*(folder / name for name in LOGS), folder):
        if path.exists():
            sync(path)


@dataclass(frozen=True)
class LoggedResponse:
    """One response. A part or a log-ratio that is not finite is None.

    ids: with the end-of-sequence if it was sampled. reward: unscaled, less penalties. parts:
    rewards that it is the sum of, unweighted, and penalties, by the names of their metrics.
    log_ratio: log π_old(y|x) − log π_ref(y|x) in nats. finished: whether it ended with an
    end-of-sequence; otherwise it was cut. turns: of a trajectory: for each the first of its ids,
    the one behind its last, rewards by name, and what the environment raised.
    """

    text: str
    ids: list[int]
    reward: float
    parts: dict[str, float | None]
    log_ratio: float | None
    finished: bool
    turns: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True)
class LoggedGroup:
    """A prompt of an update with its responses. kl: mean log-ratio of those that the policy
    sampled, in nats.
    """

    step: int
    prompt: str
    kl: float | None
    responses: list[LoggedResponse]


def read_updates(path: Path) -> Iterator[list[LoggedGroup]]:
    """Yields the groups of one update after the other. Lines that hold no group are left out."""
    for _, update in groupby(read(path), itemgetter("step")):
        groups = []
        for values in update:
            with suppress(LookupError, TypeError):  # a line of something else
                responses = [LoggedResponse(**response) for response in values["responses"]]
                if responses and all(
                    isinstance(response.reward, float | int) for response in responses
                ):
                    groups.append(LoggedGroup(**values | {"responses": responses}))
        if groups:
            yield groups


def prompt_end(prompt: str) -> str:
    """The end of a prompt, on one line."""
    line = " ".join(prompt.split())
    return line if len(line) <= SHOWN else "…" + line[-SHOWN:]
