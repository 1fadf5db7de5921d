"""Tables of paired differences whose intervals hold together."""

from collections.abc import Callable

from benchmarks.frontier.report import cells
from fastp3o.evaluation.matched_kl import Estimate

# The differences of each line, by what the line begins with; None: not measured.
Found = dict[tuple[str, ...], list[Estimate | None]]


def table(header: list[str], found: Callable[[int], Found]) -> tuple[list[list[str]], int]:
    """Header first, and how many intervals there are: each is widened for so many, which `found` takes."""
    count = sum(one is not None for estimates in found(1).values() for one in estimates)
    lines = [
        [*label, *(cells.estimate(one, signed=True) for one in estimates)] for label, estimates in found(count).items()
    ]
    return [header, *lines], count
