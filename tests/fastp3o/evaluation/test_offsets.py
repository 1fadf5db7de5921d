"""Offsets of prompts beside the spread within one."""

import math

import pytest
import torch

from fastp3o.evaluation.offsets import spread


@pytest.mark.parametrize(("within", "offset"), [(1.0, 0.0), (1.0, 0.5), (0.3, 2.0), (2.0, 2.0)])
@pytest.mark.parametrize("responses", [2, 4, 16])
def test_both_deviations_are_those_that_the_rewards_were_made_with(within, offset, responses):
    made = torch.Generator().manual_seed(responses)
    prompts = 20_000
    shared = offset * torch.randn(prompts, 1, generator=made, dtype=torch.float64)
    rewards = (
        7 + shared + within * torch.randn(prompts, responses, generator=made, dtype=torch.float64)
    )
    parts = spread(rewards)
    assert parts.within == pytest.approx(within, rel=0.03)
    # Of no offset, rounding of the estimate remains: about (2 / P)^(1/4) of the deviation of means.
    assert parts.offset == pytest.approx(offset, rel=0.03, abs=0.1 * within if offset == 0 else 0)


def test_an_offset_per_prompt_is_all_that_moves_the_ratio():
    rewards = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    apart = rewards + 3 * torch.arange(50)[:, None]
    assert spread(apart).within == pytest.approx(spread(rewards).within, rel=1e-5)
    assert spread(apart).ratio > 10 * spread(rewards).ratio
    assert spread(rewards * 8).ratio == pytest.approx(spread(rewards).ratio, rel=1e-6)


def test_rewards_without_a_spread_have_a_ratio_too():
    assert spread(torch.ones(3, 2)).offset == 0
    assert math.isnan(spread(torch.ones(3, 2)).ratio)
    assert spread(torch.tensor([[0.0, 0.0], [1.0, 1.0]])).ratio == math.inf
    assert spread(torch.ones(1, 4)) is None
    assert spread(torch.ones(4, 1)) is None
