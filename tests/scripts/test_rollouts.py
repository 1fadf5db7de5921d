import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from fastp3o.commands import rollouts
from fastp3o.errors import UserError
from fastp3o.run import log
from fastp3o.run.log import LoggedGroup, LoggedResponse

Show = Callable[..., list[list[str]]]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    """The rows of the tables that are printed; without a table, the line."""
    monkeypatch.setattr(UserError, "names_flags", True)  # as for any command

    def main(*arguments: object) -> list[list[str]]:
        monkeypatch.setattr(sys, "argv", ["fastp3o rollouts", *map(str, arguments)])
        rollouts.main()
        printed = capsys.readouterr().out
        lines = [line for line in printed.splitlines() if line.startswith("│")]
        return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines] or [
            [printed]
        ]

    return main


def group(step: int, prompt: str, *rewards: float, text: str = "says") -> LoggedGroup:
    responses = [
        LoggedResponse(f"{text} {r:g}", [1, 2, 3], r, {}, 0.125, finished=r > 0) for r in rewards
    ]
    return LoggedGroup(step, prompt, 0.125, responses)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for groups in (
        [group(1, "one", 1, 2), group(1, "two", 0, 0), group(1, "six", 9, 9)],
        [group(2, "three", 5, -7, text="[red]x[/red] \x1b[31m")],
        [group(3, "two", -4, 1), group(3, "one", 3, 4), group(3, "ten", 9)],
    ):
        log.append(tmp_path / "rollouts.jsonl", map(asdict, groups))
    return tmp_path


def test_the_best_and_worst_responses_are_shown_as_they_are(show: Show, run: Path):
    last = show(run, "--count", 2)
    assert last == [
        ["ten", "says 9", "9", "0.125", "3"],
        ["one", "says 4", "4", "0.125", "3"],
        ["two", "says -4", "-4", "0.125", "3, cut"],
        ["two", "says 1", "1", "0.125", "3"],
    ]
    assert show(run, "--update", 2)[0] == ["three", "[red]x[/red] \\x1b[31m 5", "5", "0.125", "3"]
    assert show(run, "--count", 2) == last


@pytest.mark.parametrize("update", [(), ("--update", 3)])
def test_memory_does_not_grow_with_the_log(show: Show, tmp_path: Path, update: tuple[object, ...]):
    def peak(updates: int) -> int:
        folder = tmp_path / f"run {updates}"
        folder.mkdir()
        for step in range(1, updates + 1):
            log.append(folder / "rollouts.jsonl", [asdict(group(step, "p" * 4000, 1, 2))] * 4)
        tracemalloc.start()
        show(folder, *update)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak(5)  # whatever a first call sets up
    assert peak(100) < peak(10) + 4000 * 4  # the texts of one update


def test_what_cannot_be_shown_is_said(show: Show, run: Path, capsys):
    for arguments, message in (
        ([run, "--update", 7], "has no update 7; its 3 updates are from 1 to 3"),
        ([run, "--update", 0], "has no update 0; its 3 updates are from 1 to 3"),
        ([run / "nothing"], "does not exist"),
    ):
        with pytest.raises(SystemExit):
            show(*arguments)
        assert message in capsys.readouterr().err
