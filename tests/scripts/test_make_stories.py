"""The quickstart's world: comparisons follow the taste, and the prompts of the evaluation are nowhere else."""

import json
import random
import re
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


def test_raters_follow_their_taste_with_mistakes(world):
    from make_stories import taste

    prompts, chosen, rejected = ([one[key] for one in world["comparisons"]] for key in ("prompt", "chosen", "rejected"))
    better = [a > b for a, b in zip(taste(prompts, chosen), taste(prompts, rejected), strict=True) if a != b]
    assert 0.7 < sum(better) / len(better) < 0.9


def test_stories_that_are_compared_differ(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import make_stories

    drawn = iter(["one", "one", "another"])
    monkeypatch.setattr(make_stories, "make_story", lambda *_: next(drawn))
    assert set(make_stories.compare("tell of the old king :", random.Random(0)).values()) > {"one", "another"}


def test_the_prompts_of_the_evaluation_are_held_out(world):
    prompts = {name: {one["prompt"] for one in records} for name, records in world.items()}
    unseen = prompts["prompts.eval"]
    assert len(unseen) == 30
    assert prompts["comparisons.eval"] <= unseen
    assert not unseen & (prompts["stories"] | prompts["comparisons"] | prompts["prompts"])


def test_a_model_beside_itself(world, monkeypatch, capsys):
    flags = ["--before", "data/init", "--after", "data/init", "--prompts", "data/prompts.eval.jsonl"]
    more = ["--reward", "make_stories:taste", "--responses_per_prompt", "2", "--examples", "1", "--output", "both.png"]
    run(monkeypatch, "before_after", *flags, *more)
    printed = capsys.readouterr().out.splitlines()
    before, after = (
        line.split(None, 1)[1] for line in printed if line.lstrip().startswith(("before  sampled", "after   sampled"))
    )
    assert before == after
    assert Path("both.png").stat().st_size > 1000


def test_the_pages_table_is_what_the_first_runs_printed():
    page = (SCRIPTS / "README.md").read_text()
    records = sorted((SCRIPTS.parent / "benchmarks" / "results" / "quickstart").glob("seed_*.txt"))
    assert len(records) == 10
    for seed, record in enumerate(path.read_text() for path in records):
        (accuracy,) = re.findall(r"after step 375: accuracy ([\d.]+)", record)
        (before, greedy_before), (after, greedy_after) = re.findall(r"sampled +(\S+ ± \S+) +greedy +(\S+)", record)
        row = [str(seed), f"{float(accuracy):.4g}", before, after, greedy_before, greedy_after]
        assert f"| {' | '.join(row)} |" in page
        gain = float(after.split()[0]) - float(before.split()[0])
        assert gain > 1.5 * float(before.split()[-1])
