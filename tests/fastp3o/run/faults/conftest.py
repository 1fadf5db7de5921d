"""Counts what came of the faults, for the table that is printed at the end of the session."""

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

counts: dict[str, Counter[str]] = defaultdict(Counter)


@pytest.fixture
def count() -> Callable[[str, str], None]:
    """count(what, result)"""

    def add(what: str, result: str) -> None:
        counts[what][result] += 1

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if counts:
        terminalreporter.section("faults")
        terminalreporter.write_line("| what | tried | result |\n| --- | --- | --- |")
        for what, results in counts.items():
            told = ", ".join(f"{number} {result}" for result, number in results.most_common())
            terminalreporter.write_line(f"| {what} | {results.total()} | {told} |")
