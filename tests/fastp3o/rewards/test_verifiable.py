"""Rewards of tasks whose answers are known."""

import pytest

from fastp3o.rewards.verifiable import exact_match, word_overlap


def test_the_whole_answer_and_nothing_else_is_a_match():
    responses = ["42", " 42\n", "42.", "4 2", "", "042"]
    assert exact_match([""] * 6, responses, [42] * 6) == [1, 1, 0, 0, 0, 0]
    assert exact_match([""] * 2, ["forty-two", "2.5"], ["forty-two ", 2.5]) == [1, 1]


def test_words_overlap_as_in_rouge_1():
    """The first example by hand: 3 of 4 words are among the 6 of the label, so 2 (3/4) (3/6) / (3/4
    + 3/6).
    """
    label = "The cat sat on the mat."
    scores = word_overlap(
        [""] * 5, ["the cat, the dog", label, "THE the the", "", "nothing alike"], [label] * 5
    )
    precision, recall = 3 / 4, 3 / 6
    assert scores == pytest.approx(
        [2 * precision * recall / (precision + recall), 1.0, 2 * 2 / 9, 0.0, 0.0]
    )
    assert word_overlap([""], [""], [""]) == [0.0]
