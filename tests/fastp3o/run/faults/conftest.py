import pytest

from tests.fastp3o.run.faults.scenes import COUNTS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTS:
        terminalreporter.section("faults")
        terminalreporter.write_line("| what | tried | result |\n| --- | --- | --- |")
        for what, results in COUNTS.items():
            told = ", ".join(f"{number} {result}" for result, number in results.most_common())
            terminalreporter.write_line(f"| {what} | {results.total()} | {told} |")
