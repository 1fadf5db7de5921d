"""The quickstart's world: comparisons follow the taste, and the prompts of the evaluation are nowhere else."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def world(tmp_path, monkeypatch) -> dict[str, list[dict]]:
    """The records of each file, in a small one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(SCRIPTS)
    run(monkeypatch, "make_stories", "--output_dir", "data", "--demonstrations", "300", "--comparisons", "2000")
    return {path.stem: list(map(json.loads, path.read_text().splitlines())) for path in Path("data").glob("*.jsonl")}


def run(monkeypatch, script: str, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", [script, *flags])
    runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")


def test_raters_follow_their_taste_with_mistakes_and_the_prompts_of_the_evaluation_are_held_out(world):
    from make_stories import taste

    prompts, chosen, rejected = ([one[key] for one in world["comparisons"]] for key in ("prompt", "chosen", "rejected"))
    assert all(map(str.__ne__, chosen, rejected))
    better = [a > b for a, b in zip(taste(prompts, chosen), taste(prompts, rejected), strict=True) if a != b]
    assert 0.7 < sum(better) / len(better) < 0.9
    prompts = {name: {one["prompt"] for one in records} for name, records in world.items()}
    unseen = prompts["prompts.eval"]
    assert len(unseen) == 30
    assert prompts["comparisons.eval"] <= unseen
    assert not unseen & (prompts["stories"] | prompts["comparisons"] | prompts["prompts"])


def test_a_model_beside_itself_has_the_same_rewards(world, monkeypatch, capsys):
    flags = ["--before", "data/init", "--after", "data/init", "--prompts", "data/prompts.eval.jsonl"]
    run(monkeypatch, "before_after", *flags, "--reward", "make_stories:taste", "--responses_per_prompt", "2")
    before, after = (line.split()[1:] for line in capsys.readouterr().out.splitlines() if " sampled " in line)
    assert before == after
