"""Offsets of the reward."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.frontier.tasks.language import Language
from benchmarks.frontier.tasks.offset_reward import (
    OffsetReward,
    on_grid,
    prompts_factor,
    unlearnable,
)
from fastp3o.rollouts.groups import Group, Prompt, Response

PROMPT = "topic3 style1 w017 w045 w092 w003"


def test_offsets_have_mean_zero_and_deviation_one():
    values = [unlearnable(prompt) for prompt in Language(0).prompts(3000, np.random.default_rng(1))]
    assert np.mean(values) == pytest.approx(0.0, abs=0.06)
    assert np.std(values) == pytest.approx(1.0, abs=0.06)


VALUES = st.floats(-1000, 1000)


@given(VALUES, VALUES, VALUES)
def test_on_the_grid_an_offset_leaves_the_bits_of_differences(first, second, offset):
    first, second, offset = (
        torch.tensor(on_grid(value), dtype=torch.float32) for value in (first, second, offset)
    )
    assert (first + offset) - (second + offset) == first - second


def rewards_of(**options) -> list[list[float]]:
    words = {PROMPT: ["w001", "w003"], "another": ["w002", "w004"]}
    groups = [
        Group(Prompt(text, [1]), [Response([2], word, True) for word in own])
        for text, own in words.items()
    ]
    scores = torch.tensor([[4.0, 2.0], [0.0, 1.0]])
    return OffsetReward(lambda groups: scores, mean=2.0, std=4.0, **options)(groups).tolist()


def test_a_reward_is_standardized_and_shifted():
    first, second = (on_grid(10 * unlearnable(prompt)) for prompt in (PROMPT, "another"))
    assert rewards_of() == [[0.5, 0.0], [-0.5, -0.25]]
    shifted = [[0.5 + first, first], [-0.5 + second, -0.25 + second]]
    assert rewards_of(offset=unlearnable, sd=10.0) == shifted
    assert rewards_of(offset=unlearnable, sd=10.0, factor=0.5) == [
        [one / 2 for one in group] for group in shifted
    ]


def test_a_prompts_factor_spares_evaluations_and_rewards_less_their_mean_lose_the_offset():
    factor = prompts_factor(PROMPT, 1.0)
    assert rewards_of(spread=1.0, plain=frozenset(["another"])) == [
        [on_grid(0.5 * factor), 0.0],
        [-0.5, -0.25],
    ]
    assert rewards_of(offset=unlearnable, sd=10.0, centred=True) == [[0.25, -0.25], [-0.125, 0.125]]
    assert rewards_of(centred=True, plain=frozenset([PROMPT, "another"])) == [
        [0.5, 0.0],
        [-0.5, -0.25],
    ]
