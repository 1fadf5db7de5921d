"""Win rates at equal length, against a second implementation and closed forms."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch

from fastp3o.evaluation.length_controlled import NotDeterminedError, length_controlled
from fastp3o.evaluation.rival import Rival, against_rivals, preferences
from fastp3o.rewards.comparing_function import ComparingFunction
from fastp3o.rewards.function import FunctionReward, compares_siblings
from fastp3o.rewards.reward import WeightedSum, rewarded
from fastp3o.rollouts.groups import Group, lengths
from tests.fastp3o.groups import groups_of_texts


def test_every_kind_of_reward_says_by_how_many_characters_responses_are_longer_than_the_rivals():
    """One that compares, a score and a sum meet the k-th, a function that compares siblings the
    mean of two.
    """
    groups = groups_of_texts(["abc", "a"], ["", "abcd"])
    rivals = [
        group.responses for group in groups_of_texts(["a", "abc", "ab"], ["ab", "a", "abcdef"])
    ]
    by_place, by_mean = [[2.0, -2.0], [-2.0, 3.0]], [[1.0, -1.0], [-1.5, 2.5]]

    def shorter(prompts, firsts, seconds):
        return [float(len(a) < len(b)) for a, b in zip(firsts, seconds, strict=True)]

    @compares_siblings
    def rank(prompts, responses):
        return [float(len(response)) for response in responses]

    comparing, siblings = (
        ComparingFunction("shorter", None, shorter),
        FunctionReward("rank", None, rank),
    )
    total = WeightedSum({"shorter": comparing, "score": lengths}, [1.0, 1.0])
    rewards = against_rivals(
        {"reward": comparing, "rank": siblings, "score": lengths, "total": total}, rivals, 2
    )
    rival = Rival(
        rivals,
        rewarded(
            rewards, [Group(g.prompt, its[:2]) for g, its in zip(groups, rivals, strict=True)]
        ),
    )
    tables = preferences(rewards, rewarded(rewards, groups), groups, rival)
    expected = {"win_rate": by_place, "rank/win_rate": by_mean, "score/win_rate": by_place}
    expected |= {"total/win_rate": by_place, "total/win_rate/shorter": by_place}
    assert {name: table.longer.tolist() for name, table in tables.items()} == expected
    assert tables["win_rate"].preferred.tolist() == [[0.0, 1.0], [1.0, 0.0]]


def logit(share: float) -> float:
    return np.log(share / (1 - share))


def expected(preferred: np.ndarray, longer: np.ndarray) -> float:
    """By a general optimizer, one comparison at a time."""
    pairs = [(p, d) for p, d in zip(preferred.tolist(), longer.tolist(), strict=True) if p == p]
    deviation = float(np.std([d for _, d in pairs]))
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=500,
        tolerance_grad=1e-13,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for p, d in pairs:
            odds = weights[0] + weights[1] * np.tanh(d / deviation)
            total = (
                total
                - p * torch.nn.functional.logsigmoid(odds)
                - (1 - p) * torch.nn.functional.logsigmoid(-odds)
            )
        (total / len(pairs)).backward()
        return total / len(pairs)

    optimizer.step(loss)
    return weights[0].sigmoid().item()


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_that_of_a_second_implementation_for_verdicts_and_for_probabilities(seed, soft):
    random = np.random.default_rng(seed)
    longer = random.integers(-400, 900, 60).astype(float)
    odds = 1 / (1 + np.exp(-(random.normal() + 0.004 * longer)))
    preferred = odds if soft else (random.random(60) < odds).astype(float)
    preferred[::7], preferred[3] = np.nan, 0.5
    assert length_controlled(preferred, longer) == pytest.approx(
        expected(preferred, longer), abs=1e-6
    )
    # A prompt's responses are comparisons like any others.
    assert length_controlled(preferred.reshape(20, 3), longer.reshape(20, 3)) == length_controlled(
        preferred, longer
    )


def test_with_two_lengths_it_is_the_mean_of_both_shares_log_odds():
    """The fit has as many weights as there are shares."""
    longer = np.array([70.0] * 8 + [-70.0] * 2)
    preferred = np.array([1.0] * 6 + [0.0] * 2 + [1.0, 0.0])
    rate = length_controlled(preferred, longer)
    assert logit(rate) == pytest.approx((logit(6 / 8) + logit(1 / 2)) / 2)
    assert rate < preferred.mean()  # whose wins are of longer responses


def test_a_win_rate_that_is_all_length_becomes_even_and_one_without_it_stays():
    random = np.random.default_rng(0)
    longer = random.normal(200, 150, 4000)
    by_length = 1 / (1 + np.exp(-2 * np.tanh(longer / longer.std())))
    assert by_length.mean() > 0.75
    assert length_controlled(by_length, longer) == pytest.approx(0.5, abs=1e-9)
    assert length_controlled(np.full(4000, 0.7), longer) == pytest.approx(0.7, abs=1e-9)
    assert length_controlled(1 - by_length, -longer) == pytest.approx(0.5, abs=1e-9)


def separated(preferred: np.ndarray, longer: np.ndarray) -> bool:
    """Whether a threshold has all wins on one side of it and all losses on the other, either
    perhaps at it.
    """
    values = sorted({*longer.tolist()})
    thresholds = [
        values[0] - 1,
        *values,
        *(sum(two) / 2 for two in pairwise(values)),
        values[-1] + 1,
    ]
    return any(
        all(
            (sign * (d - c) >= 0 or p == 0) and (sign * (d - c) <= 0 or p == 1)
            for p, d in zip(preferred, longer, strict=True)
        )
        for c, sign in product(thresholds, (-1, 1))
    )


def test_it_is_refused_exactly_where_a_threshold_of_length_separates_wins_from_losses():
    """All verdicts on four comparisons, with all orders of three lengths."""
    seen = {True: 0, False: 0}
    for verdicts, by in product(
        product((0.0, 0.5, 1.0), repeat=4), product((-1.0, 0.0, 3.0), repeat=4)
    ):
        preferred, longer = np.array(verdicts), np.array(by)
        alone = separated(preferred, longer) or len({*by}) == 1
        seen[alone] += 1
        if alone:
            with pytest.raises(NotDeterminedError):
                length_controlled(preferred, longer)
        else:
            assert 0 < length_controlled(preferred, longer) < 1
    assert min(seen.values()) > 1000


@pytest.mark.parametrize(
    ("preferred", "longer", "why"),
    [
        ([np.nan, np.nan], [1, 2], "no comparison has a verdict"),
        ([1, 1, np.nan], [1, 2, 3], "every comparison is won"),
        ([0, 0], [1, 2], "every comparison is lost"),
        ([0, 1, 0.5], [7, 7, 7], "by the same in all comparisons"),
        ([0, 0, 1], [1, 2, 3], "separate all wins from all losses"),
        ([1, 1, 0], [1, 2, 3], "separate all wins from all losses"),
    ],
)
def test_what_is_missing_is_told(preferred, longer, why):
    with pytest.raises(NotDeterminedError, match=why):
        length_controlled(np.array(preferred, dtype=float), np.array(longer, dtype=float))


def test_verdicts_that_are_almost_separated_still_have_a_fit():
    preferred = np.array([1e-12, 1 - 1e-12] * 3)
    assert length_controlled(
        preferred, np.array([-3.0, 3.0, -2.0, 2.0, -1.0, 1.0])
    ) == pytest.approx(0.5, abs=1e-6)
