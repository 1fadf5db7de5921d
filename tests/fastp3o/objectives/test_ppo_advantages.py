from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o.objectives.ppo import estimate_advantages, token_rewards, whiten


def ragged(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(sum(lengths), generator=generator, dtype=torch.float64) for _ in range(2))


def by_definition(rewards: torch.Tensor, values: torch.Tensor, gae_lambda: float) -> torch.Tensor:
    """The sum of equation 16 written out, for one response."""
    T = len(rewards)
    deltas = [rewards[t] + (values[t + 1] if t + 1 < T else 0) - values[t] for t in range(T)]
    return torch.stack([sum(gae_lambda ** (u - t) * deltas[u] for u in range(t, T)) for t in range(T)])


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.integers(0, 99))
def test_ragged_responses_have_the_advantages_of_each_alone(lengths, gae_lambda, seed):
    rewards, values = ragged(lengths, seed)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    result = estimate_advantages(rewards, values, cu_seqlens, max(lengths), gae_lambda=gae_lambda)
    expected = [
        by_definition(r, v, gae_lambda) for r, v in zip(rewards.split(lengths), values.split(lengths), strict=True)
    ]
    torch.testing.assert_close(result, torch.cat(expected))


def test_lambda_one_compares_what_came_with_what_was_expected():
    rewards, values = ragged([4], 0)
    to_come = rewards.flip(0).cumsum(0).flip(0)
    advantages = estimate_advantages(rewards, values, torch.tensor([0, 4]), 4, gae_lambda=1.0)
    torch.testing.assert_close(advantages, to_come - values)


def test_each_token_pays_for_its_kl_and_the_last_one_earns_the_reward():
    logprobs, ref_logprobs = ragged([2, 1, 3], 1)
    cu_seqlens = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    rewards = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    result = token_rewards(rewards, logprobs, ref_logprobs, cu_seqlens, kl_coef=0.5)
    penalties = -0.5 * (logprobs - ref_logprobs)
    torch.testing.assert_close(result, penalties + torch.tensor([0, 1, 2, 0, 0, 3.0], dtype=torch.float64))


def alone(sums: torch.Tensor) -> torch.Tensor:
    """Sums over the one process there is."""
    return sums


def test_whitening_keeps_the_pieces_and_takes_mean_and_deviation_of_all():
    pieces = [torch.randn(5) * 3 + 7, torch.randn(1) - 20, torch.randn(8)]
    whitened = whiten(pieces, alone)
    assert [len(piece) for piece in whitened] == [5, 1, 8]
    together = torch.cat(whitened)
    assert together.mean().item() == pytest.approx(0, abs=1e-6)
    assert together.std(unbiased=False).item() == pytest.approx(1, abs=1e-5)


def test_equal_values_become_zero():
    assert torch.equal(torch.cat(whiten([torch.full((4,), 2.5)], alone)), torch.zeros(4))
