"""Sums with known answers: the data, the reward that reads them, and the stages of the arithmetic quickstart, tiny."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from fastp3o.rewards.verifiable import exact_match, word_overlap
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


def test_every_sum_is_there_in_both_forms(script):
    script("make_arithmetic.py", output="one/sums.jsonl", largest=12)
    script("make_arithmetic.py", output="two/sums.jsonl", largest=12)
    sums = records("one/sums.jsonl")
    forms = {(record["prompt"], record["label"], record["answer"]) for record in sums}
    assert forms == {(f"{a}+{b}=", f"{a + b}{end}", a + b) for a in range(13) for b in range(13) for end in ("", ".")}
    assert len(sums) == len(forms)
    assert sums == records("two/sums.jsonl")


def test_the_stages_of_the_quickstart_run_on_the_sums(script):
    script("make_arithmetic.py", output="sums.jsonl", largest=1)
    sizes = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 16, "layers": 1, "heads": 2, "max_tokens": 32}
    script("make_tiny_llama.py", text="sums.jsonl", output_dir="init", **sizes)
    lengths = {"max_prompt_tokens": 8, "max_response_tokens": 4, "report_to": "none"}
    script("sft.py", model="init", train_data="sums.jsonl", output_dir="sft", batch_size=4, **lengths)
    script(
        "p3o.py",
        model="sft/model",
        reward="fastp3o.rewards.verifiable:exact_match",
        prompts="sums.jsonl",
        eval_prompts="sums.jsonl",
        output_dir="p3o",
        updates=1,
        prompts_per_update=4,
        samples_every=0,
        **lengths,
    )
    assert all(0 <= line["reward"] <= 1 for line in metrics("p3o", "eval.jsonl"))


def test_words_overlap_as_in_rouge_1():
    """The first example by hand: 3 of 4 words are among the 6 of the label, so 2 (3/4) (3/6) / (3/4 + 3/6)."""
    label = "The cat sat on the mat."
    scores = word_overlap([""] * 5, ["the cat, the dog", label, "THE the the", "", "nothing alike"], [label] * 5)
    precision, recall = 3 / 4, 3 / 6
    assert scores == pytest.approx([2 * precision * recall / (precision + recall), 1.0, 2 * 2 / 9, 0.0, 0.0])
    assert word_overlap([""], [""], [""]) == [0.0]
