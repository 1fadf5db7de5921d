"""Accuracy and calibration of pairs, on examples made by hand and on draws whose truth is known."""

from math import log

import numpy as np
import pytest

from fastp3o.evaluation.calibration import calibration_error, judged


def logit(probability: float) -> float:
    """The r_w − r_l whose sigmoid it is."""
    return log(probability / (1 - probability))


def test_pairs_count_from_the_side_of_the_higher_score_and_equal_scores_as_half_right():
    sure, unsure = logit(0.92), logit(0.61)
    differences = np.array([sure, sure, -sure, unsure, -unsure, unsure, unsure])
    expected = (4 * abs(0.61 - 3 / 4) + 3 * abs(0.92 - 2 / 3)) / 7
    assert calibration_error(differences, (np.sign(differences) + 1) / 2) == pytest.approx(expected)
    assert (
        judged([(0, 0.0, 1.0), (1, 0.0, 1.0), (2, 1e3, 1.0), (3, 800.0, 1.0)])["calibration_error"]
        == 0
    )


def test_prompts_count_alike_and_are_units_of_the_interval():
    """A prompt of three pairs, all right, beside one of a single pair, which is wrong."""
    metrics = judged([(0, 1.0, 1.0), (1, -1.0, 1.0), (0, 2.0, 1.0), (0, 3.0, 1.0)])
    assert (metrics["accuracy_low"], metrics["accuracy_high"]) == (0, 1)
    metrics = judged([(number, 1.0 if number % 4 else -1.0, 1.0) for number in range(400)])
    half = 1.96 * (0.75 * 0.25 / 400) ** 0.5
    assert (metrics["accuracy_low"], metrics["accuracy_high"]) == pytest.approx(
        (0.75 - half, 0.75 + half), abs=0.01
    )
    assert judged([(0, float("nan"), 1.0), (1, 1.0, 1.0)]) == {}
