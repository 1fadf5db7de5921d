"""Commands that read the evaluations of runs: seeds are paired, and runs of one name stay apart."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from fastp3o.commands import compare as command
from fastp3o.commands import frontier
from fastp3o.commands.frontier import linear_fit
from fastp3o.errors import UserError
from fastp3o.evaluation.matched_kl import read_run


@pytest.fixture
def compare(monkeypatch, capsys):
    def main(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["fastp3o compare", *map(str, arguments)])
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
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"eval_prompts": "prompts.jsonl", "seed": seed})
    )
    return folder


def test_arms_are_compared_seed_by_seed(compare, tmp_path):
    first = [write_run(tmp_path / f"first-{seed}", seed) for seed in range(6)]
    second = [write_run(tmp_path / f"second-{seed}", seed, 0.75) for seed in range(6)]
    printed = compare("--first", *first, "--second", *second, "--kl", "2", "4")
    # The seeds' own part cancels: the difference is a quarter of the KL, without spread.
    assert "0.500 [0.500, 0.500] (6)" in printed
    assert printed.count("not reached") == 2
    assert "6 seeds in both" in printed
    # Before the first evaluation after update 0 no gain was measured, and one seed has no interval.
    printed = compare("--first", *first[:3], "--second", *second[2:], "--kl", "0.25", "2")
    assert "KL exceeded (3)" in printed
    assert "KL exceeded (4)" in printed
    assert " 2.010 [1.985, 2.035] (3) │" in printed
    assert " 0.500 (1) │" in printed
    assert "1 seeds in both" in printed


def test_a_second_run_of_a_seed_is_refused_by_name(compare, tmp_path):
    run, again = write_run(tmp_path / "run", 0), write_run(tmp_path / "again", 0)
    with pytest.raises(UserError, match=r"again is a second run with seed 0 on prompts\.jsonl"):
        compare("--first", run, again, "--second", run)


def test_runs_of_the_same_name_are_all_shown_with_the_line_that_fits_them(
    monkeypatch, tmp_path, capsys
):
    for name, per_nat in (("a/p3o", 2.0), ("b/p3o", 2.0), ("b/ppo", 1.0)):
        write_run(tmp_path / name, 0, per_nat)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fastp3o frontier", "a/p3o", "b/p3o", "b/ppo"])
    frontier.main()
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("a/p3o", "b/p3o", "ppo"))
    run = read_run(Path("b/p3o"))
    assert linear_fit(run) == pytest.approx((2.0, 5.0))
    assert linear_fit(run[:1]) is None
