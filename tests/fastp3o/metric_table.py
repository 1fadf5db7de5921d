"""The table of metrics in fastp3o/training/metrics.md, which every run of the tests is held against."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[2] / "fastp3o" / "training" / "metrics.md"


@cache
def documented() -> list[re.Pattern[str]]:
    """A pattern for each name in the table's first column; NAME in it stands for any name."""
    _, table, _ = re.split(r"<!-- /?metrics -->", PAGE.read_text())
    first_cells = [line.split("|")[1] for line in table.strip().splitlines()[2:]]
    names = [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(set(names)) == len(names), "a metric stands in one line"
    return [re.compile(re.escape(name).replace("NAME", ".+")) for name in names]


def require_documented(names: Iterable[str]) -> None:
    missing = [name for name in names if not any(pattern.fullmatch(name) for pattern in documented())]
    assert not missing, f"{PAGE.name} has no line for {', '.join(missing)}"
