"""Rewards that are the differences of pairs, [P, K, K], as comparisons give them: no scores need
have them.
"""

import math

import pytest
import torch

from fastp3o_kernels import P3OSettings, p3o_loss, token_p3o_loss
from tests.kernels.levels import IMPLEMENTATIONS, Batch
from tests.kernels.problems import CLIPPINGS, DEVICE, budget_for
from tests.pairwise import pairwise


def differences(rewards):
    return rewards[:, :, None] - rewards[:, None, :]


def comparisons(P, K, seed=0):
    """Skew-symmetric and in circles."""
    above = torch.rand(P, K, K, generator=torch.Generator().manual_seed(seed)).sub(0.5).triu(1)
    return (above - above.transpose(1, 2)).to(DEVICE)


@pytest.mark.parametrize(
    ("clipping", "level", "impl", "K"),
    pairwise(
        list(CLIPPINGS), ["tokens", "logits", "hidden", "hidden, its own"], IMPLEMENTATIONS, [2, 4]
    ),
)
def test_differences_of_scores_are_the_scores_to_the_bit(clipping, level, impl, K):
    given = {"memory_budget": budget_for(30, 50)} if "hidden" in level else {}
    batch = Batch(level, [3, 4, 0, 2, 1, 1, 12, 20], clipping=clipping, K=K, masked=True, apart=0.3)
    expected, targets = batch.run(impl, **given)
    batch.pairs.rewards = differences(batch.pairs.rewards)
    output, gradients = batch.run(impl, **given)
    assert torch.equal(output.loss, expected.loss)
    assert all(map(torch.equal, gradients, targets))
    assert all(torch.equal(output.metrics[name], value) for name, value in expected.metrics.items())


@pytest.mark.parametrize("clipping", ["joint", "separate", "none"])
@pytest.mark.parametrize(("K", "kl_reward"), [(3, "current"), (5, "rollout")])
def test_comparisons_in_circles_weigh_their_own_pairs(clipping, K, kl_reward, impl):
    """Against the formulas of the paper, one pair at a time, in fp64."""
    P, beta, epsilon, cap = 4, 0.3, 0.2, 10.0
    batch = Batch(
        "responses", [1] * (P * K), clipping=clipping, K=K, kl_coef=beta, kl_reward=kl_reward
    )
    batch.pairs.rewards = comparisons(P, K)
    (leaf,) = batch.leaves()
    values = leaf.detach().double().view(P, K).requires_grad_()
    old, ref = batch.pairs.old_logprobs.double(), batch.pairs.ref_logprobs.double()
    total = values.new_zeros(())
    for p in range(P):
        for i in range(K):
            for j in range(i + 1, K):
                u = values[p, i] - ref[p, i] - values[p, j] + ref[p, j]
                u_old = old[p, i] - ref[p, i] - old[p, j] + ref[p, j]
                q = (
                    batch.pairs.rewards[p, i, j] - beta * (u if kl_reward == "current" else u_old)
                ).detach()
                ratios = [(values[p, k] - old[p, k]).exp() for k in (i, j)]
                held = [ratio.detach().clamp(1 / cap, cap) for ratio in ratios]
                if clipping == "separate":
                    for weight, ratio in ((-q * held[1], ratios[0]), (q * held[0], ratios[1])):
                        total = total + torch.maximum(
                            weight * ratio, weight * ratio.clamp(1 - epsilon, 1 + epsilon)
                        )
                else:
                    weight = -q * (ratios[0] * ratios[1]).detach().clamp(1 / cap, cap)
                    clipped = weight * torch.clamp(u, u_old - epsilon, u_old + epsilon)
                    total = total + (
                        torch.maximum(weight * u, clipped) if clipping == "joint" else weight * u
                    )
    expected = total / (math.comb(K, 2) * 2 * P)
    (target,) = torch.autograd.grad(expected, values)
    output, (gradient,) = batch.run(impl)
    torch.testing.assert_close(output.loss.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double().view(P, K), target, rtol=1e-4, atol=1e-6)


def test_without_clipping_the_gradient_is_that_of_row_means(impl):
    """On-policy, where PPG is: Σ_ij D_ij (∇ log π_i − ∇ log π_j) is 2 K Σ_i s_i ∇ log π_i, s the
    row means.
    """
    P, K = 3, 4
    logprobs, matrix = -torch.rand(P, K, device=DEVICE), comparisons(P, K)
    settings = P3OSettings(clipping="none", kl_coef=0.0)
    gradients = []
    for rewards in (matrix, matrix.mean(2)):
        leaf = logprobs.clone().requires_grad_()
        p3o_loss(leaf, None, logprobs, rewards, settings, impl=impl).loss.backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_wrong_shapes_and_values_are_named():
    logprobs = torch.zeros(2, 3, device=DEVICE)
    with pytest.raises(ValueError, match=r"rewards must have shape.*\[P, K, K\].*got \[2, 3, 2\]"):
        token_p3o_loss(
            logprobs.flatten(),
            list(range(7)),
            logprobs,
            logprobs,
            torch.zeros(2, 3, 2, device=DEVICE),
        )
    with pytest.raises(ValueError, match="rewards"):
        p3o_loss(logprobs, logprobs, logprobs, torch.zeros(2, 2, 2, device=DEVICE))
    matrix = comparisons(2, 3)
    matrix[1, 2, 0] = float("nan")
    with pytest.raises(ValueError, match=r"rewards\[1, 2\] is NaN: response 3 of prompt 1"):
        p3o_loss(logprobs, logprobs, logprobs, matrix)
