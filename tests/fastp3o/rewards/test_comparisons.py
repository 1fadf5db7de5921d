"""Comparisons as rewards: D of verdicts, which pairs are judged, functions that compare, mixtures
and cascades.
"""

import asyncio
from itertools import combinations
from math import nan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o import UserError
from fastp3o.calls.function import FunctionError
from fastp3o.rewards.comparing_function import ComparingFunction, load_function
from fastp3o.rewards.comparisons import (
    ComparisonCascade,
    JudgedPairs,
    Knockout,
    judged_pairs,
    row_means,
)
from fastp3o.rewards.config import PenaltyConfig
from fastp3o.rewards.function import FunctionReward, compares_siblings
from fastp3o.rewards.reward import (
    PAIR_REWARDS,
    WeightedSum,
    logged_means,
    penalized_rewards,
    rewarded,
)
from fastp3o.rewards.scaling import AbsoluteScaler, DifferenceScaler, differences
from fastp3o.rollouts.groups import Response
from tests.fastp3o.groups import groups_of_texts

GROUPS = groups_of_texts(["rock", "paper", "scissors"], ["paper", "paper", "rock"], word=["a", "b"])
BEATS = {("paper", "rock"), ("scissors", "paper"), ("rock", "scissors")}


def game(prompts, firsts, seconds):
    """It goes in circles, which no score has."""
    return [0.5 if a == b else float((a, b) in BEATS) for a, b in zip(firsts, seconds, strict=True)]


def comparing(function) -> ComparingFunction:
    reward = load_function("tests:function", None, function)
    assert isinstance(reward, ComparingFunction)
    return reward


def test_d_is_the_probability_less_a_half_and_circles_have_no_scores():
    reward = comparing(game)
    matrix = reward.matrix(GROUPS)
    assert matrix.dtype == torch.float32
    assert matrix[0].tolist() == [[0, -0.5, 0.5], [0.5, 0, -0.5], [-0.5, 0.5, 0]]
    assert matrix[1].tolist() == [[0, 0, 0.5], [0, 0, 0.5], [-0.5, -0.5, 0]]
    scores = reward(GROUPS)
    assert torch.equal(scores, row_means(matrix))
    assert scores[0].tolist() == [0, 0, 0]
    torch.testing.assert_close(scores[1], torch.tensor([0.5, 0.5, -1.0]) / 3)


@given(st.integers(2, 9), st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_row_means_of_differences_of_scores_have_these_differences(K, seed):
    """To the bit for two responses; and D stays what it is whatever is added to all scores of a
    prompt.
    """
    scores = torch.randint(-64, 64, (5, K), generator=torch.Generator().manual_seed(seed)) / 256
    matrix = scores[:, :, None] - scores[:, None, :]
    torch.testing.assert_close(
        differences(row_means(matrix)), differences(scores), rtol=0, atol=1e-6
    )
    assert torch.equal(differences(matrix), differences(scores))
    if K == 2:
        assert torch.equal(differences(row_means(matrix)), differences(scores))
        for scaler in (DifferenceScaler, lambda clip: DifferenceScaler(clip, scale=False)):
            weights = [
                scaler(1.5)(scores),
                scaler(1.5)(row_means(matrix)),
                scaler(1.5).of_pairs(matrix),
            ]
            assert all(
                torch.equal(differences(weight), differences(weights[0])) for weight in weights
            )


def test_absolute_scaling_divides_comparisons_by_the_deviation_of_row_means():
    matrix = torch.randn(6, 4, 4).triu(1)
    matrix = matrix - matrix.transpose(1, 2)
    scaler, of_scores = AbsoluteScaler(0.0), AbsoluteScaler(0.0)
    scaled, _ = scaler.of_pairs(matrix), of_scores(row_means(matrix))
    torch.testing.assert_close(scaled * of_scores.std(), matrix)


def test_which_pairs_are_judged():
    assert judged_pairs("all", 4) == list(combinations(range(4), 2))
    assert judged_pairs("circular", 4) == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert judged_pairs("circular", 2) == judged_pairs("all", 2) == [(0, 1)]
    asked = []

    def better(prompts, firsts, seconds):
        asked.extend(zip(firsts, seconds, strict=True))
        return [1.0] * len(firsts)

    reward = comparing(better)
    reward.judged = "circular"
    matrix = reward.matrix(groups_of_texts(["a", "b", "c", "d"]))
    assert asked == [("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")]
    assert matrix[0].tolist() == [
        [0, 0.5, 0, -0.5],
        [-0.5, 0, 0.5, 0],
        [0, -0.5, 0, 0.5],
        [0.5, 0, -0.5, 0],
    ]


def test_an_anchor_is_compared_with_each_response_and_d_is_half_their_difference():
    asked = []

    def better(prompts, firsts, seconds):
        asked.extend(zip(firsts, seconds, strict=True))
        return [{"a": 1.0, "b": 0.25, "c": None}[first] for first in firsts]

    reward = comparing(better)
    reward.anchor = lambda prompts: [Response([1], prompt.text[-1], True) for prompt in prompts]
    matrix = reward.matrix(groups_of_texts(["a", "b", "c", "0"]))
    assert asked == [("a", "0"), ("b", "0"), ("c", "0")]  # the anchor's own text is a tie
    assert matrix[0].tolist() == [
        [0, 0.375, 0, 0.25],
        [-0.375, 0, 0, -0.125],
        [0, 0, 0, 0],
        [-0.25, 0.125, 0, 0],
    ]
    assert reward.answered.tolist() == [[1, 1, 0, 1]]


def test_ties_and_missing_verdicts_count_for_nothing_and_equal_texts_are_not_asked_about():
    asked = []

    def better(prompts, firsts, seconds, log_metric):
        asked.extend(zip(prompts, firsts, seconds, strict=True))
        log_metric("asked", len(firsts))
        return [None, "tie", 0.9][: len(firsts)]

    reward = comparing(better)
    values = rewarded({"reward": reward}, groups_of_texts(["a", "b", "c"]))
    assert reward.compared.tolist() == [
        [[0, 0, 0], [0, 0, pytest.approx(0.4)], [0, pytest.approx(-0.4), 0]]
    ]
    assert values["reward_answered"].tolist() == [[0.5, 0.5, 1.0]]
    assert logged_means({"reward": reward}) == {"reward/asked": 3.0}
    asked.clear()
    assert not reward.matrix(groups_of_texts(["same", "same"])).any()
    assert asked == []


def test_answers_are_probabilities_words_or_none_in_any_list():
    answers = [True, 0, np.float32(0.25), torch.tensor(0.75), "first", "second", "tie"]
    texts = [["a", "b"]] * len(answers)
    expected = [1, 0, 0.25, 0.75, 1, 0, 0.5]
    for kept in (list, tuple):
        found = comparing(lambda prompts, firsts, seconds, kept=kept: kept(answers)).matrix(
            groups_of_texts(*texts)
        )
        assert (found[:, 0, 1] + 0.5).tolist() == expected
    numbers = comparing(lambda prompts, firsts, seconds: torch.linspace(0, 1, len(firsts)))
    assert (numbers.matrix(groups_of_texts(*texts[:3]))[:, 0, 1] + 0.5).tolist() == [0, 0.5, 1]


def test_an_async_function_is_awaited_and_columns_come_by_name():
    async def better(prompts, firsts, seconds, word, *, other=None):
        assert other is None
        await asyncio.sleep(0)
        return [float(one == "a") for one in word]

    reward = comparing(better)
    assert reward.columns == ["word"]
    assert reward.matrix(GROUPS)[:, 0, 2].tolist() == [0.5, -0.5]
    with pytest.raises(UserError, match="asks for the columns word"):
        reward.matrix(groups_of_texts(["a", "b"]))


@pytest.mark.parametrize(
    ("answer", "shown"),
    [(1.5, "1.5"), (-0.1, "-0.1"), (nan, "nan"), ("A", "'A'"), ([1.0], r"\[1.0\]"), ({}, "{}")],
)
def test_a_bad_answer_is_refused_with_its_pair(answer, shown):
    reward = comparing(lambda prompts, firsts, seconds: [0.5, 0.5, answer, 0.5, 0.5])
    expected = (
        rf"tests:function must return P.*got {shown} for response 2 and response 3 to 'prompt 0'"
    )
    with pytest.raises(FunctionError, match=expected):
        reward.matrix(GROUPS)
    with pytest.raises(FunctionError, match="must return 3 entries"):
        reward.matrix(groups_of_texts(["a", "b", "c"]))


def test_the_names_of_its_parameters_say_that_a_function_compares():
    assert isinstance(
        load_function("f", None, lambda prompts, responses, seconds: [0.0]), FunctionReward
    )
    with pytest.raises(UserError, match=r"must take prompts, firsts, seconds first.*it takes"):
        load_function("f", None, lambda firsts, seconds, prompts: [0.0])


def test_a_cascade_of_comparisons_passes_pairs_on():
    asked = []

    def rule(prompts, firsts, seconds):
        return [
            None if "c" in first + second else 1.0
            for first, second in zip(firsts, seconds, strict=True)
        ]

    def judge(prompts, firsts, seconds):
        asked.extend(zip(firsts, seconds, strict=True))
        return [0.25] * len(firsts)

    cascade = ComparisonCascade({"rule": comparing(rule), "judge": comparing(judge)})
    values = rewarded({"reward": cascade}, groups_of_texts(["a", "b", "c"]))
    assert asked == [("a", "c"), ("b", "c")]
    assert cascade.compared[0].tolist() == [[0, 0.5, -0.25], [-0.5, 0, -0.25], [0.25, 0.25, 0]]
    assert values["reward/rule_answered"].unique().tolist() == [pytest.approx(1 / 3)]
    assert values["reward/judge_answered"].unique().tolist() == [pytest.approx(2 / 3)]


def test_comparisons_scores_and_penalties_mix_with_weights():
    def words(prompts, responses):
        return [float(len(response)) for response in responses]

    parts = {
        "game": comparing(game),
        "words": FunctionReward("f:words", None, words),
        "other": comparing(game),
    }
    reward = WeightedSum(parts, [2.0, 0.5, 0.0])
    penalties = PenaltyConfig(missing_eos_penalty=4.0)
    groups = [
        group._replace(responses=[r._replace(finished="r" in r.text) for r in group.responses])
        for group in GROUPS
    ]
    values = penalized_rewards(reward, groups, penalties, 9)
    lengths = torch.tensor([[len(r.text) for r in group.responses] for group in groups]) / 2
    ends = 4.0 * torch.tensor([["r" not in r.text for r in group.responses] for group in groups])
    matrix = comparing(game).matrix(groups)
    totals = lengths - ends
    expected = 2 * matrix + totals[:, :, None] - totals[:, None, :]
    torch.testing.assert_close(values[PAIR_REWARDS], expected)
    torch.testing.assert_close(values["reward"], 2 * matrix.mean(2) + totals)
    assert torch.equal(values["reward/game"], matrix.mean(2))
    assert PAIR_REWARDS not in penalized_rewards(
        FunctionReward("f:words", None, words), groups, penalties, 9
    )


def test_a_function_that_compares_siblings_is_checked_with_as_many_as_a_prompt_has():
    seen = []

    def share(prompts, responses):
        seen.append(len(responses))
        return (
            np.array([len(response) for response in responses]).reshape(-1, 4).argsort(1).flatten()
        )

    FunctionReward("f:share", None, compares_siblings(share)).check(GROUPS[0].prompt, 4)
    assert seen == [4]
    FunctionReward("f:other", None, lambda prompts, responses: [0.0] * len(responses)).check(
        GROUPS[0].prompt, 4
    )


def test_models_that_processes_share_are_asked_about_every_pair():
    """Also about responses of the same text, which stay a tie."""
    asked = []

    class Model(JudgedPairs):
        together = True

        def ask(self, comparisons):
            asked.append(len(comparisons))
            return [1.0] * len(comparisons)

    cascade = ComparisonCascade({"game": comparing(game), "model": Model()})
    assert torch.equal(cascade.matrix(GROUPS), comparing(game).matrix(GROUPS))
    assert asked == [6]


@pytest.mark.parametrize("K", [2, 3, 5, 8])
def test_a_knockout_has_the_best_response_win_in_one_comparison_less_than_there_are(K):
    asked = []

    def larger(prompts, firsts, seconds):
        asked.extend(firsts)
        return [float(int(a) > int(b)) for a, b in zip(firsts, seconds, strict=True)]

    texts = [list(np.random.default_rng(n).permutation(K).astype(str)) for n in range(4)]
    rounds = Knockout(comparing(larger))(groups_of_texts(*texts))
    assert len(asked) == 4 * (K - 1)
    assert [its[place] for its, place in zip(texts, rounds.argmax(1).tolist(), strict=True)] == [
        str(K - 1)
    ] * 4
    assert rounds.max().item() == (K - 1).bit_length()
    without = Knockout(comparing(lambda prompts, firsts, seconds: [None] * len(firsts)))
    assert without(groups_of_texts(["a", "b", "c", "d"])).tolist() == [[2, 0, 1, 0]]
