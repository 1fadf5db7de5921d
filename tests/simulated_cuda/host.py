"""The host beside a device that is late: what it launches and waits for, with the places in our
code.

A copy to the host that nobody has waited for is poison: NaN, or random numbers. A copy from pinned
memory is read when the host next waits: memory that has changed until then was changed too early.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SELF = Path(__file__).parent
ROOT = SELF.parents[1]
OURS = tuple(
    f"{ROOT}/{folder}/" for folder in ("fastp3o", "kernels", "scripts", "benchmarks", "tests")
)


class Place(NamedTuple):
    """The innermost function of ours on the stack; code of libraries that it called is not named."""

    file: str  # from the top of the project
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


def place() -> Place:
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OURS) and Path(file).parent != SELF:
            return Place(file.removeprefix(f"{ROOT}/"), frame.f_code.co_qualname, frame.f_lineno)
        frame = frame.f_back
    return Place("a thread of torch", "", 0)


@dataclass(eq=False)  # a record is found among others by what it is, not by what it holds
class Record:
    waits: list[tuple[str, Place]] = field(default_factory=list)
    # operations of torch, copies, `triton NAME`, graphs
    launches: Counter[str] = field(default_factory=Counter)
    devices: Counter[str] = field(default_factory=Counter)  # launches by device

    def places(self) -> Counter[tuple[str, str]]:
        """How often the host waited, by file and function."""
        return Counter((place.file, place.function) for _, place in self.waits)

    def table(self) -> str:
        lines = [f"{self.launches.total()} launches, {len(self.waits)} waits of the host"]
        lines += [
            f"{count:6d} x {kind} at {place}"
            for (kind, place), count in Counter(self.waits).most_common()
        ]
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


def note_launch(name: str) -> None:
    for record in records:
        record.launches[name] += 1


def write_counts(name: str, counts: dict) -> None:
    """Adds counts to the JSON file that FASTP3O_COUNTS names, if it names one."""
    if path := os.environ.get("FASTP3O_COUNTS"):
        file = Path(path)
        noted = json.loads(file.read_text()) if file.exists() else {}
        noted |= {package: version(package) for package in ("torch", "transformers")}
        file.write_text(json.dumps(noted | {name: counts}, indent=1) + "\n")


@dataclass
class Host:
    """time: grows with every copy. under_way: times of copies, and what ends them. may_wait: False
    where torch was told to raise. capture: the graph under way.
    """

    time: int = 0
    under_way: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    may_wait: bool = True
    capture: Any = None


host = Host()


def wait_for_device(kind: str, until: int | None = None) -> None:
    """The host waits for all copies so far, or those until a time. Raises RuntimeError where CUDA
    forbids it.
    """
    if host.capture is not None:
        raise RuntimeError(
            f"CUDA error: operation not permitted when stream is capturing ({kind} at {place()})"
        )
    if not host.may_wait:
        raise RuntimeError(f"called a synchronizing CUDA operation ({kind} at {place()})")
    for record in records:
        record.waits.append((kind, place()))
    finish_copies(host.time if until is None else until)


def finish_copies(until: int) -> None:
    done = [finish for time, finish in host.under_way if time <= until]
    host.under_way = [copy for copy in host.under_way if copy[0] > until]
    for finish in done:
        finish()


def copy_later(finish: Callable[[], None]) -> None:
    host.time += 1
    host.under_way.append((host.time, finish))


def copy_to_host_later(target: Tensor, values: Tensor) -> None:
    """target, values: on the host. target is poison until the host has waited."""
    if target.is_floating_point():
        target.fill_(float("nan"))
    else:
        target.random_(0, 2 if target.dtype == torch.bool else 100)
    copy_later(lambda: target.copy_(values))


def copy_to_device_later(source: Tensor) -> None:
    """source: pinned memory. It must hold the same values until the host has waited."""
    where, values = place(), source.clone()

    def check() -> None:
        if not torch.equal(source.view(torch.uint8), values.view(torch.uint8)):
            raise RuntimeError(
                f"pinned memory has changed before its copy to the device was over (copied at {where})"
            )

    if source.is_contiguous() and source.dim():
        copy_later(check)
