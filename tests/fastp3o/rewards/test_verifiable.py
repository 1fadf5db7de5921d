"""Sums with known answers, and the rewards of tasks whose answers are known."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from fastp3o.rewards.verifiable import exact_match, word_overlap

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_arithmetic.py"


def test_the_whole_answer_and_nothing_else_is_a_match():
    responses = ["42", " 42\n", "42.", "4 2", "", "042"]
    assert exact_match([""] * 6, responses, [42] * 6) == [1, 1, 0, 0, 0, 0]
    assert exact_match([""] * 2, ["forty-two", "2.5"], ["forty-two ", 2.5]) == [1, 1]


def test_every_sum_is_there_in_both_forms_and_in_the_same_order(workplace, monkeypatch):
    written = []
    for folder in ("one", "two"):
        monkeypatch.setattr(sys, "argv", [SCRIPT.name, f"--output={folder}/sums.jsonl", "--largest=12"])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        written.append(Path(folder, "sums.jsonl").read_text())
    sums = [json.loads(line) for line in written[0].splitlines()]
    forms = {(record["prompt"], record["label"], record["answer"]) for record in sums}
    assert forms == {(f"{a}+{b}=", f"{a + b}{end}", a + b) for a in range(13) for b in range(13) for end in ("", ".")}
    assert len(sums) == len(forms)
    assert written[0] == written[1]


def test_words_overlap_as_in_rouge_1():
    """The first example by hand: 3 of 4 words are among the 6 of the label, so 2 (3/4) (3/6) / (3/4 + 3/6)."""
    label = "The cat sat on the mat."
    scores = word_overlap([""] * 5, ["the cat, the dog", label, "THE the the", "", "nothing alike"], [label] * 5)
    precision, recall = 3 / 4, 3 / 6
    assert scores == pytest.approx([2 * precision * recall / (precision + recall), 1.0, 2 * 2 / 9, 0.0, 0.0])
    assert word_overlap([""], [""], [""]) == [0.0]
