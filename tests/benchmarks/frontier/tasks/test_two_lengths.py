"""Responses whose lengths differ by a factor of 4."""

import numpy as np

from benchmarks.frontier.tasks.two_lengths import LONG, SHORT, TwoLengths, graded, worth


def test_half_of_the_responses_are_short_and_no_length_is_favored():
    task, rng = TwoLengths(0), np.random.default_rng(1)
    prompts = task.language.prompts(4000, rng)
    responses = task.responses(prompts, rng)
    words = np.array([len(response.split()) for response in responses])
    short, long = ((words >= low) & (words <= high) for low, high in (SHORT, LONG))
    assert (short | long).all()
    assert 0.45 < short.mean() < 0.55
    assert 3.5 < words[long].mean() / words[short].mean() < 4.5
    utilities = task.utility(prompts, responses)
    for kind in (short, long):
        assert abs(utilities[kind].mean()) < 0.1
        assert abs(utilities[kind].std() - 1) < 0.1


def test_a_response_is_graded_among_those_of_its_kind_and_the_rarer_kind_pays():
    rewards = graded(np.array([1.0, 3.0, 10.0, 2.0]), np.array([False, False, True, False]))
    np.testing.assert_allclose(rewards, [-1.75, 0.25, 0.75, -0.75])
    np.testing.assert_allclose(graded(np.array([1.0, 3.0]), np.array([True, True])), [-2.5, -0.5])


def test_the_worth_of_words_is_that_of_their_shares_and_less_for_repeats():
    weights = np.zeros(12)
    weights[[0, 1]] = 1.0, -1.0
    once = [0, 1, 2, 30]
    assert worth(weights, once) == np.sqrt(0.75)
    assert worth(weights, [*once, *once]) == np.sqrt(0.75) - 0.5
    assert worth(weights, [0, 10]) == 0.0
    assert worth(weights, [-1, 5]) == np.sqrt(0.5)
    assert worth(weights, []) < -2
