"""The record of what a device was asked to do: waits of the host and launches, with the places in our code."""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OURS = (f"{ROOT}/fastp3o/", f"{ROOT}/kernels/", f"{ROOT}/scripts/", f"{ROOT}/benchmarks/", f"{ROOT}/tests/")
SELF = Path(__file__).parent


class Place(NamedTuple):
    """The innermost function of ours on the stack; code of libraries that it called is not named."""

    file: str  # from the top of the project
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


class Wait(NamedTuple):
    kind: str
    place: Place


@dataclass(eq=False)  # a record is found among others by what it is, not by what it holds
class Record:
    waits: list[Wait] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)  # operations of torch, copies, `triton NAME`, graphs
    devices: Counter[str] = field(default_factory=Counter)  # launches by device
    variants: dict[str, Counter[tuple]] = field(default_factory=dict)  # of Triton's kernels: what would be compiled

    def places(self) -> Counter[tuple[str, str]]:
        """How often the host waited, by file and function."""
        return Counter((wait.place.file, wait.place.function) for wait in self.waits)

    def table(self) -> str:
        lines = [f"{self.launches.total()} launches, {len(self.waits)} waits of the host"]
        lines += [f"{count:6d} x {wait.kind} at {wait.place}" for wait, count in Counter(self.waits).most_common()]
        lines += [f"{count:6d} x {name}" for name, count in self.launches.most_common(20)]
        return "\n".join(lines)


records = [Record()]


@contextmanager
def recorded() -> Iterator[Record]:
    """What happens inside goes to this record, and to those of the blocks around it."""
    record = Record()
    records.append(record)
    try:
        yield record
    finally:
        records.remove(record)


def note_wait(kind: str) -> None:
    wait = Wait(kind, place())
    for record in records:
        record.waits.append(wait)


def note_launch(name: str) -> None:
    for record in records:
        record.launches[name] += 1


def note_device(device: object) -> None:
    for record in records:
        record.devices[str(device)] += 1


def note_variant(kernel: str, variant: tuple) -> None:
    for record in records:
        record.variants.setdefault(kernel, Counter())[variant] += 1


def write_counts(name: str, counts: dict) -> None:
    """Adds counts to the JSON file that FASTP3O_COUNTS names, if it names one."""
    if path := os.environ.get("FASTP3O_COUNTS"):
        file = Path(path)
        noted = json.loads(file.read_text()) if file.exists() else {}
        noted |= {package: version(package) for package in ("torch", "transformers")}
        file.write_text(json.dumps(noted | {name: counts}, indent=1) + "\n")


def place() -> Place:
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OURS) and Path(file).parent != SELF:
            return Place(file.removeprefix(f"{ROOT}/"), frame.f_code.co_qualname, frame.f_lineno)
        frame = frame.f_back
    return Place("a thread of torch", "", 0)
