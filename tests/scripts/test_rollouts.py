import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from fastp3o.commands import rollouts
from fastp3o.errors import UserError
from fastp3o.run import log
from fastp3o.run.log import LoggedGroup, LoggedResponse

Show = Callable[..., str]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    monkeypatch.setattr(UserError, "names_flags", True)  # as for any command

    def main(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["rollouts.py", *map(str, arguments)])
        rollouts.main()
        return capsys.readouterr().out

    return main


def group(step: int, prompt: str, *rewards: float, text: str = "says") -> LoggedGroup:
    responses = [
        LoggedResponse(f"{text} {reward:g}", [1, 2, 3], reward, {}, 0.125, finished=reward > 0) for reward in rewards
    ]
    return LoggedGroup(step, prompt, 0.125, responses)


def append_groups(folder: Path, groups: list[LoggedGroup]) -> None:
    log.append(folder / "rollouts.jsonl", map(asdict, groups))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    append_groups(tmp_path, [group(1, "one", 1, 2), group(1, "two", 0, 0), group(1, "six", 9, 9)])
    append_groups(tmp_path, [group(2, "three", 5, -7)])
    append_groups(tmp_path, [group(3, "two", -4, 1), group(3, "one", 3, 4), group(3, "ten", 9)])
    return tmp_path


def rows(printed: str) -> list[list[str]]:
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_best_and_worst_of_the_last_update(show: Show, run: Path):
    printed = show(run, "--count", 2)
    assert "update 3: best of 5 logged responses" in printed
    assert "update 3: worst of 5 logged responses" in printed
    assert rows(printed) == [
        ["ten", "says 9", "9", "0.125", "3"],
        ["one", "says 4", "4", "0.125", "3"],
        ["two", "says -4", "-4", "0.125", "3, cut"],
        ["two", "says 1", "1", "0.125", "3"],
    ]


def test_another_update(show: Show, run: Path):
    assert rows(show(run, "--update", 2))[0] == ["three", "says 5", "5", "0.125", "3"]


def test_the_most_changed_prompts_of_two_updates(show: Show, run: Path):
    printed = show(run, "--update", 1, "--compare", 3)
    assert "from update 1 to update 3: most changed of the 2 logged prompts in both" in printed
    assert rows(printed) == [
        ["one", "1.5 to 3.5", "says 1", "1", "says 3", "3"],
        ["", "", "says 2", "2", "says 4", "4"],
        ["two", "0 to -1.5", "says 0", "0", "says -4", "-4"],
        ["", "", "says 0", "0", "says 1", "1"],
    ]
    assert rows(show(run, "--update", 3, "--compare", 1, "--count", 1))[0][:2] == ["one", "3.5 to 1.5"]


def test_updates_without_a_common_prompt_are_said_in_one_line(show: Show, run: Path):
    assert show(run, "--update", 1, "--compare", 2) == (
        "no logged prompt is in both update 1 and update 2: prompts come again in the next epoch\n"
    )


def test_text_is_printed_as_it_is(show: Show, tmp_path: Path):
    text = "[red]x[/red] :smile: \x1b[31m\x07\u202eevil\u200b\tend"
    append_groups(tmp_path, [group(1, "[b]p[/b]", 1, text=text)])
    printed = show(tmp_path)
    assert "[red]x[/red] :smile: \\x1b[31m\\x07" in printed
    assert "\\u202eevil\\u200b\\tend 1" in " ".join(printed.split())
    assert "[b]p[/b]" in printed
    assert all(character.isprintable() or character == "\n" for character in printed)


def test_a_run_that_is_still_writing(show: Show, run: Path):
    path = run / "rollouts.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert "update 3: best of 4 logged responses" in show(run)


def test_a_run_that_has_ended(show: Show, run: Path):
    printed = show(run)
    log.finish(run / "rollouts.jsonl")
    assert show(run) == printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--update", 7], "has no update 7; it has 1, 2, 3"),
        (["--compare", 7], "has no update 7; it has 1, 2, 3"),
        (["--compare", 3], "--compare must be another update than --update, got 3 twice"),
        (["--count", 0], "--count must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_shown_is_said(show: Show, run: Path, capsys, arguments: list, message: str):
    with pytest.raises(SystemExit):
        show(run, *arguments)
    assert message in capsys.readouterr().err


def test_a_folder_without_rollouts_is_said(show: Show, tmp_path: Path, capsys):
    with pytest.raises(SystemExit):
        show(tmp_path)
    assert "rollouts.jsonl does not exist: give the folder of an online run" in capsys.readouterr().err
    (tmp_path / "rollouts.jsonl").touch()
    with pytest.raises(SystemExit):
        show(tmp_path)
    assert "holds no whole update yet" in capsys.readouterr().err


def test_many_updates_are_said_in_short(show: Show, tmp_path: Path, capsys):
    for step in range(10, 201, 10):
        append_groups(tmp_path, [group(step, "one", 1)])
    with pytest.raises(SystemExit):
        show(tmp_path, "--update", 7)
    assert "it has 10, 20, ..., 200" in capsys.readouterr().err
