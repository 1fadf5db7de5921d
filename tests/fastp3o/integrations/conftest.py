import pytest


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL reports that it is used, except in CI."""
    monkeypatch.setenv("CI", "true")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of what the tests of losses recorded, whichever process ran them."""
    rows = [
        row
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        for name, row in report.user_properties
        if name == "against TRL" and report.when == "call"
    ]
    if rows:
        terminalreporter.section("our losses against TRL's")
        header = "objective", "ours", "TRL's", "apart", "gradients apart, relative"
        for row in [header, *rows]:
            terminalreporter.line("{:<20}{:>10}{:>12}{:>10}  {}".format(*row))
