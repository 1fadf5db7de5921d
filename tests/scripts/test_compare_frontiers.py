import json
import sys
from pathlib import Path

import pytest
import yaml

from fastp3o.commands import compare as command


@pytest.fixture
def compare(monkeypatch, capsys):
    def main(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["compare_frontiers.py", *map(str, arguments)])
        command.main()
        return capsys.readouterr().out

    return main


def write_run(folder: Path, seed: int, per_nat: float) -> Path:
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
    first = [write_run(tmp_path / f"first-{seed}", seed, 1.0) for seed in range(6)]
    second = [write_run(tmp_path / f"second-{seed}", seed, 0.75) for seed in range(6)]
    printed = compare("--first", *first, "--second", *second, "--kl", "2", "4")
    # The seeds' own part cancels: the difference is a quarter of the KL, without spread.
    assert "0.500 [0.500, 0.500] (6)" in printed
    assert printed.count("not reached") == 2
    assert "passed" not in printed
    assert "6 seeds in both" in printed


def test_a_kl_that_was_passed_before_an_evaluation_is_told_apart(compare, tmp_path):
    runs = [write_run(tmp_path / f"run-{seed}", seed, 1.0) for seed in range(2)]
    printed = compare("--first", *runs, "--second", *runs, "--kl", "0.25", "4")
    assert printed.count("passed at once (2)") == printed.count("not reached") == 2
    assert "--eval_at 1,2,5" in printed


def test_few_seeds_have_a_mean_alone(compare, tmp_path):
    arms = [[write_run(tmp_path / f"{arm}-{seed}", seed, 1.0) for seed in range(3)] for arm in ("first", "second")]
    assert "│ 0.000 (3) │" in " ".join(compare("--first", *arms[0], "--second", *arms[1], "--kl", "2").split())


def test_without_a_shared_seed_there_is_no_difference(compare, tmp_path):
    first, second = write_run(tmp_path / "first", 0, 1.0), write_run(tmp_path / "second", 1, 1.0)
    assert "0 seeds in both" in compare("--first", first, "--second", second, "--kl", "2")


def test_what_cannot_be_compared_is_refused_by_name(compare, tmp_path, capsys):
    run = write_run(tmp_path / "run", 0, 1.0)
    again = write_run(tmp_path / "again", 0, 1.0)
    for arguments, message in (
        (["--first", run, again, "--second", run], "again is a second run with seed 0 on prompts.jsonl"),
        (["--first", run, "--second", tmp_path / "nothing"], "has no evaluations"),
        (["--first", run, "--second", run, "--metric", "gold"], "was evaluated without a gold reward"),
    ):
        with pytest.raises(SystemExit):
            compare(*arguments)
        assert message in " ".join(capsys.readouterr().err.split())
