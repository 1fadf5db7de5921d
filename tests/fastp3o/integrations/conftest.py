import pytest


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL reports that it is used, except in CI."""
    monkeypatch.setenv("CI", "true")
