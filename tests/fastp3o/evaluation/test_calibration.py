"""Accuracy and calibration of pairs, on examples made by hand and on draws whose truth is known."""

from math import log

import numpy as np
import pytest

from fastp3o.evaluation.calibration import calibration_error, judged, numbered


def logit(probability: float) -> float:
    """The r_w − r_l whose sigmoid it is."""
    return log(probability / (1 - probability))


def test_pairs_count_from_the_side_of_the_higher_score_and_equal_scores_as_half_right():
    sure, unsure = logit(0.92), logit(0.61)
    differences = np.array([sure, sure, -sure, unsure, -unsure, unsure, unsure])
    expected = (4 * abs(0.61 - 3 / 4) + 3 * abs(0.92 - 2 / 3)) / 7
    assert calibration_error(differences, (np.sign(differences) + 1) / 2) == pytest.approx(expected)
    pairs = [(0, 0.0, 1.0), (1, 0.0, 1.0), (2, 1e3, 1.0), (3, 800.0, 1.0)]
    assert judged(pairs, range(4))["calibration_error"] == 0


def test_records_count_alike_and_are_units_of_the_interval_where_prompts_differ():
    """A record of three pairs, all right, beside one of a single pair, which is wrong."""
    pairs = [(0, 1.0, 1.0), (1, -1.0, 1.0), (0, 2.0, 1.0), (0, 3.0, 1.0)]
    assert bounds(pairs, range(2)) == (0, 1)
    half = 1.96 * (0.75 * 0.25 / 400) ** 0.5
    assert bounds(draws(), range(400)) == pytest.approx((0.75 - half, 0.75 + half), abs=0.01)
    assert judged([(0, float("nan"), 1.0), (1, 1.0, 1.0)], range(2)) == {}


def test_records_that_repeat_a_prompt_do_not_narrow_the_interval():
    prompts = numbered([[7, number // 2] for number in range(800)])
    twice = [(2 * number + again, *pair) for number, *pair in draws() for again in range(2)]
    assert prompts[:4] == [0, 0, 1, 1]
    assert bounds(twice, prompts) == pytest.approx(bounds(draws(), range(400)))


def draws() -> list[tuple[int, float, float]]:
    """400 pairs, three of four right."""
    return [(number, 1.0 if number % 4 else -1.0, 1.0) for number in range(400)]


def bounds(pairs, prompt_of) -> tuple[float, float]:
    metrics = judged(pairs, prompt_of)
    return metrics["accuracy_low"], metrics["accuracy_high"]
