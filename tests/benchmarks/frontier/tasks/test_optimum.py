import numpy as np
import pytest

from benchmarks.frontier.tasks import optimum


def test_the_optimum_of_two_responses_is_the_one_in_closed_form():
    rewards = np.array([[0.0, 1.0]])
    found = optimum.point(rewards, beta=0.5)
    p = 1 / (1 + np.exp(-2.0))
    assert found["reward_gain"] == pytest.approx(p - 0.5, rel=1e-4)
    assert found["kl"] == pytest.approx(p * np.log(2 * p) + (1 - p) * np.log(2 - 2 * p), rel=1e-4)
    assert found["ess"] == pytest.approx(1 / (p**2 + (1 - p) ** 2), rel=1e-4)


def test_equal_rewards_have_nothing_to_gain():
    found = optimum.point(np.ones((2, 8)), beta=0.1)
    assert (found["kl"], found["reward_gain"], found["ess"]) == pytest.approx((0, 0, 8), abs=1e-9)
