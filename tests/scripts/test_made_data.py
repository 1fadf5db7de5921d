"""Data that scripts make: comparisons follow a taste, and what evaluates is not in what trains."""

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
    run(
        monkeypatch,
        "make_stories",
        "--output_dir",
        "data",
        "--demonstrations",
        "300",
        "--comparisons",
        "2000",
    )
    return records("data")


def records(folder) -> dict[str, list[dict]]:
    files = Path(folder).glob("*.jsonl")
    return {
        path.stem: list(map(json.loads, path.read_text("utf-8").splitlines())) for path in files
    }


def run(monkeypatch, script: str, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", [script, *flags])
    runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")


def test_raters_follow_their_taste_with_mistakes_and_the_prompts_of_the_evaluation_are_held_out(
    world,
):
    from make_stories import taste

    prompts, chosen, rejected = (
        [one[key] for one in world["comparisons"]] for key in ("prompt", "chosen", "rejected")
    )
    assert all(map(str.__ne__, chosen, rejected))
    better = [
        a > b
        for a, b in zip(taste(prompts, chosen), taste(prompts, rejected), strict=True)
        if a != b
    ]
    assert 0.7 < sum(better) / len(better) < 0.9
    prompts = {name: {one["prompt"] for one in records} for name, records in world.items()}
    unseen = prompts["prompts.eval"]
    assert len(unseen) == 30
    assert prompts["comparisons.eval"] <= unseen
    assert not unseen & (prompts["stories"] | prompts["comparisons"] | prompts["prompts"])


def test_a_model_beside_itself_has_the_same_rewards(world, monkeypatch, capsys):
    flags = [
        "--before",
        "data/init",
        "--after",
        "data/init",
        "--prompts",
        "data/prompts.eval.jsonl",
    ]
    run(
        monkeypatch,
        "before_after",
        *flags,
        "--reward",
        "make_stories:taste",
        "--responses_per_prompt",
        "2",
    )
    before, after = (
        line.split()[1:] for line in capsys.readouterr().out.splitlines() if " sampled " in line
    )
    assert before == after


def test_docstrings_of_a_module_are_in_one_split_and_rejected_lines_are_not_the_summary(
    tmp_path, monkeypatch
):
    given = ("--stdlib_only", "--max_pairs", "150", "--workers", "1")
    run(monkeypatch, "make_docstring_tldr", "--output_dir", str(tmp_path), *given)
    found = records(tmp_path)
    modules = {}
    for split in ("train", "eval"):
        truth = {record["prompt"]: record["label"] for record in found[f"sft.{split}"]}
        modules[split] = {prompt.split("\n", 1)[0] for prompt in truth}
        pairs = found[f"preferences.{split}"]
        assert modules[split]
        assert all(pair["chosen"] == truth[pair["prompt"]] != pair["rejected"] for pair in pairs)
    assert not modules["train"] & modules["eval"]


def test_every_sum_is_there_in_both_forms_and_in_the_same_order(tmp_path, monkeypatch):
    for name in ("one", "two"):
        run(monkeypatch, "make_arithmetic", f"--output={tmp_path}/{name}.jsonl", "--largest=12")
    sums = records(tmp_path)["one"]
    forms = {(record["prompt"], record["label"], record["answer"]) for record in sums}
    assert forms == {
        (f"{a}+{b}=", f"{a + b}{end}", a + b)
        for a in range(13)
        for b in range(13)
        for end in ("", ".")
    }
    assert len(sums) == len(forms)
    assert (tmp_path / "one.jsonl").read_text() == (tmp_path / "two.jsonl").read_text()
