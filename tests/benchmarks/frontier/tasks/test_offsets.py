"""Offsets of the reward."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.frontier.tasks.language import Language
from benchmarks.frontier.tasks.offset_reward import OFFSETS, OffsetReward, on_grid, prompts_factor, unlearnable
from fastp3o.rollouts.groups import Group, Prompt, Response

ROOT = Path(__file__).parents[4]
PROMPT = "topic3 style1 w017 w045 w092 w003"


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return Language(0).prompts(3000, np.random.default_rng(1))


def test_offsets_have_mean_zero_and_deviation_one(prompts):
    values = [unlearnable(prompt) for prompt in prompts]
    assert np.mean(values) == pytest.approx(0.0, abs=0.06)
    assert np.std(values) == pytest.approx(1.0, abs=0.06)


VALUES = st.floats(-1000, 1000)


@given(VALUES, VALUES, VALUES)
def test_on_the_grid_an_offset_leaves_the_bits_of_differences(first, second, offset):
    first, second, offset = (torch.tensor(on_grid(value), dtype=torch.float32) for value in (first, second, offset))
    assert (first + offset) - (second + offset) == first - second


@pytest.mark.parametrize("name", OFFSETS)
def test_a_reward_is_standardised_and_shifted(name):
    responses = {PROMPT: ["w001", "w003"], "another": ["w002", "w004"]}
    groups = [Group(Prompt(text, [1]), [Response([2], word, True) for word in own]) for text, own in responses.items()]
    scores = torch.tensor([[5.0, 3.0], [1.0, 2.0]])
    reward = OffsetReward(lambda groups: scores, mean=2.0, std=4.0, offset=OFFSETS[name], sd=10.0)
    shifts = [0.0 if OFFSETS[name] is None else on_grid(10 * OFFSETS[name](prompt)) for prompt in responses]
    expected = [[0.75 + shifts[0], 0.25 + shifts[0]], [-0.25 + shifts[1], shifts[1]]]
    assert reward(groups).tolist() == expected
    assert replace(reward, factor=0.5)(groups).tolist() == [[value / 2 for value in group] for group in expected]


def two_groups() -> tuple[list[Group], torch.Tensor]:
    words = {PROMPT: ["w001", "w003"], "another": ["w002", "w004"]}
    groups = [Group(Prompt(text, [1]), [Response([2], word, True) for word in own]) for text, own in words.items()]
    return groups, torch.tensor([[4.0, 2.0], [0.0, 1.0]])


def test_a_prompts_factor_multiplies_its_rewards_but_not_those_of_evaluations():
    groups, scores = two_groups()
    reward = OffsetReward(lambda groups: scores, mean=0.0, std=1.0, spread=1.0, plain=frozenset(["another"]))
    factor = prompts_factor(PROMPT, 1.0)
    assert reward(groups).tolist() == [[on_grid(4 * factor), on_grid(2 * factor)], [0.0, 1.0]]
    assert prompts_factor(PROMPT, 0.0) == 1.0


def test_factors_have_mean_one_and_say_nothing_of_offsets(prompts):
    factors = np.array([prompts_factor(prompt, 0.5) for prompt in prompts])
    assert factors.mean() == pytest.approx(1.0, abs=0.05)
    assert np.log(factors).std() == pytest.approx(0.5, abs=0.03)
    offsets = [unlearnable(prompt) for prompt in prompts]
    assert abs(np.corrcoef(np.log(factors), offsets)[0, 1]) < 0.06


def test_less_their_mean_rewards_lose_the_offset():
    groups, scores = two_groups()
    reward = OffsetReward(lambda groups: scores, mean=2.0, std=4.0, offset=unlearnable, sd=10.0, centred=True)
    assert reward(groups).tolist() == [[0.25, -0.25], [-0.125, 0.125]]
    deviation = 0.5 / 2**0.5 + 1e-4
    assert replace(reward, standardised=True)(groups)[0].tolist() == pytest.approx(
        [0.25 / deviation, -0.25 / deviation]
    )
    shown = replace(reward, offset=None, plain=frozenset([PROMPT, "another"]))
    assert shown(groups).tolist() == [[0.5, 0.0], [-0.5, -0.25]]
