"""Commands that read the evaluations of runs: seeds are paired, and runs of one name stay apart."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from fastp3o.commands import compare as command
from fastp3o.commands import frontier


@pytest.fixture
def compare(monkeypatch, capsys):
    def main(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["compare_frontiers.py", *map(str, arguments)])
        command.main()
        return capsys.readouterr().out

    return main


def write_run(folder: Path, seed: int, per_nat: float = 1.0) -> Path:
    """Gains on a straight line, apart from what the seed adds."""
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "kl": kl, "reward": 5 + per_nat * kl + 0.01 * seed * (kl > 0)}
        | {"reward_std": 1.0, "kl_std": 1.0, "prompts": 8}
        for step, kl in enumerate([0.0, 0.5, 1.5, 3.0])
    ]
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(yaml.safe_dump({"eval_prompts": "prompts.jsonl", "seed": seed}))
    return folder


def test_arms_are_compared_seed_by_seed(compare, tmp_path):
    first = [write_run(tmp_path / f"first-{seed}", seed) for seed in range(6)]
    second = [write_run(tmp_path / f"second-{seed}", seed, 0.75) for seed in range(6)]
    printed = compare("--first", *first, "--second", *second, "--kl", "2", "4")
    # The seeds' own part cancels: the difference is a quarter of the KL, without spread.
    assert "0.500 [0.500, 0.500] (6)" in printed
    assert printed.count("not reached") == 2
    assert "6 seeds in both" in printed
    # Before the first evaluation after update 0 no gain was measured, and three seeds have no interval.
    printed = compare("--first", *first[:3], "--second", *second[2:], "--kl", "0.25", "2")
    assert "passed at once (3)" in printed
    assert "passed at once (4)" in printed
    assert " 2.010 (3) │" in printed
    assert "1 seeds in both" in printed


def test_what_cannot_be_compared_is_refused_by_name(compare, tmp_path, capsys):
    run, again = write_run(tmp_path / "run", 0), write_run(tmp_path / "again", 0)
    for arguments, message in (
        (["--first", run, again, "--second", run], "again is a second run with seed 0 on prompts.jsonl"),
        (["--first", run, "--second", run, "--metric", "gold"], "was evaluated without a gold reward"),
    ):
        with pytest.raises(SystemExit):
            compare(*arguments)
        assert message in " ".join(capsys.readouterr().err.split())


def test_runs_of_the_same_name_are_all_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(frontier, "read_run", str)
    monkeypatch.setattr(frontier, "print_table", shown.append)
    monkeypatch.setattr(frontier, "plot", lambda runs, output: None)
    monkeypatch.setattr(sys, "argv", ["plot_frontier.py", "a/p3o", "b/p3o", "b/ppo"])
    frontier.main()
    assert shown == [{"a/p3o": "a/p3o", "b/p3o": "b/p3o", "ppo": "b/ppo"}]
