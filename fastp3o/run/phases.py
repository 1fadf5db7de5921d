"""Seconds that each phase of a step takes, and the most memory that a run has used."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Phases:
    """Seconds spent in each named phase since the last reading."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + now() - start

    def read(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory_gib() -> float:
    """The most memory used so far: the GPU's if there is one, else the process's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    kib = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kib / 2**30
