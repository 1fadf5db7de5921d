"""Sums with known answers: the data, the reward that reads them, and the stages of the arithmetic quickstart, tiny."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from fastp3o.rewards.verifiable import exact_match
from tests.fastp3o.runs import metrics

SCRIPTS = Path(__file__).parents[3] / "scripts"


def test_the_whole_answer_and_nothing_else_is_a_match():
    responses = ["42", " 42\n", "42.", "4 2", "", "forty-two", "042"]
    assert exact_match([""] * 7, responses, [42] * 7) == [1, 1, 0, 0, 0, 0, 0]
    assert exact_match([""] * 2, ["forty-two", "2.5"], ["forty-two ", 2.5]) == [1, 1]


@pytest.fixture
def script(workplace, monkeypatch):
    def run(name: str, **flags: object) -> None:
        arguments = [f"--{flag}={value}" for flag, value in flags.items()]
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")

    return run


def records(name: str) -> list[dict]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def test_sums_are_right_and_held_out_ones_apart(script):
    script("make_arithmetic.py", output_dir="one", largest=12, held_out=20)
    script("make_arithmetic.py", output_dir="two", largest=12, held_out=20)
    train, held_out = records("one/sums.train.jsonl"), records("one/sums.eval.jsonl")
    assert (len(train), len(held_out)) == (13 * 13 - 20, 20)
    assert len({record["prompt"] for record in train + held_out}) == 13 * 13
    right = []
    for record in train + held_out:
        first, second = record["prompt"].removesuffix("=").split("+")
        assert len(first) == len(second) == 2
        assert int(first) + int(second) == record["answer"]
        answer = str(record["answer"])
        assert record["label"] in (answer, answer[::-1])
        if answer != answer[::-1]:
            right.append(record["label"] == answer)
    assert 0.3 < sum(right) / len(right) < 0.7
    assert (train, held_out) == (records("two/sums.train.jsonl"), records("two/sums.eval.jsonl"))


def test_the_stages_of_the_quickstart_run_on_the_sums(script):
    script("make_arithmetic.py", output_dir="data", largest=3, held_out=4)
    sizes = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 16, "layers": 1, "heads": 2, "max_tokens": 32}
    script("make_tiny_llama.py", text="data/sums.train.jsonl", output_dir="init", **sizes)
    lengths = {"max_prompt_tokens": 8, "max_response_tokens": 4, "report_to": "none"}
    script("sft.py", model="init", train_data="data/sums.train.jsonl", output_dir="sft", batch_size=4, **lengths)
    script(
        "p3o.py",
        model="sft/model",
        reward="fastp3o.rewards.verifiable:exact_match",
        prompts="data/sums.train.jsonl",
        eval_prompts="data/sums.eval.jsonl",
        output_dir="p3o",
        updates=1,
        prompts_per_update=4,
        samples_every=0,
        **lengths,
    )
    assert all(0 <= line["reward"] <= 1 for line in metrics("p3o", "eval.jsonl"))
