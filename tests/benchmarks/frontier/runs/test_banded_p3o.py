"""P3O with bands by length: the loss and its gradient against one pair at a time in fp64, and what
must hold for every band.
"""

import math
from functools import partial

import pytest
import torch

from benchmarks.frontier.runs.banded_p3o import ARMS, LENGTH, banded_p3o
from fastp3o_kernels import Groups, P3OSettings
from fastp3o_kernels.p3o.losses import token_p3o_loss

P, K, KL_COEF = 5, 4, 0.1


def problem(seed: int, lengths: torch.Tensor | None = None, spread: float = 0.05):
    """Groups of responses of 1 to 64 tokens in fp64, with old and reference log-probs and rewards."""
    generator = torch.Generator().manual_seed(seed)
    if lengths is None:
        lengths = torch.randint(1, 65, (P * K,), generator=generator)
    tokens = -torch.rand(int(lengths.sum()), generator=generator, dtype=torch.float64)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    groups = Groups(tokens.requires_grad_(), offsets, K, {})
    noise = [torch.randn(len(tokens), generator=generator, dtype=torch.float64) for _ in range(2)]
    old = groups.sums(tokens.detach() + spread * noise[0])
    ref = groups.sums(tokens.detach() + 0.1 * noise[1])
    return groups, old, ref, torch.randn(P, K, generator=generator, dtype=torch.float64)


def gradient(loss: torch.Tensor, groups: Groups) -> torch.Tensor:
    return torch.autograd.grad(loss, groups.token_logprobs, retain_graph=True)[0]


def oracle(groups, old, ref, rewards, growth=0.0, division=0.0):
    """Loss and gradient by the definition, one pair at a time; the gradient's formula by hand."""
    tokens, bounds = groups.token_logprobs.detach(), groups.cu_seqlens.tolist()
    loss, by_hand = 0.0, torch.zeros_like(tokens)
    for prompt in range(P):
        for i in range(K):
            for j in range(i + 1, K):
                spans = [slice(*bounds[prompt * K + k : prompt * K + k + 2]) for k in (i, j)]
                sizes = [span.stop - span.start for span in spans]
                scales = [(16 / size) ** division for size in sizes]
                found = [float(tokens[span].sum()) for span in spans]
                moved = [
                    scale * (value - float(old[prompt, k]))
                    for scale, value, k in zip(scales, found, (i, j), strict=True)
                ]
                kl = [value - float(ref[prompt, k]) for value, k in zip(found, (i, j), strict=True)]
                q = float(rewards[prompt, i] - rewards[prompt, j]) - KL_COEF * (kl[0] - kl[1])
                c = min(max(math.exp(moved[0] + moved[1]), 0.1), 10.0)
                band = 0.2 * (sum(sizes) / 2 / 16) ** growth
                m = moved[0] - moved[1]
                inside = min(max(m, -band), band)
                loss += max(-q * c * m, -q * c * inside) / 2 / math.comb(K, 2)
                # A pair that has moved the way q says, beyond its band, has no gradient.
                if not (abs(m) > band and m * q > 0):
                    for sign, span, scale in zip((1, -1), spans, scales, strict=True):
                        by_hand[span] += -sign * scale * q * c / 2 / math.comb(K, 2)
    return loss, by_hand


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_one_pair_at_a_time(arm, seed):
    groups, old, ref, rewards = problem(seed)
    loss, metrics = banded_p3o(groups, old, ref, rewards, kl_coef=KL_COEF, **ARMS[arm])
    expected, by_hand = oracle(groups, old, ref, rewards, **ARMS[arm])
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient(loss, groups), by_hand, rtol=1e-12, atol=1e-15)
    assert 0 < metrics["clip_fraction"] < P
    assert 0 < metrics["gradient_left"] < P


def test_the_fixed_band_has_the_gradient_of_joint_p3o():
    groups, old, ref, rewards = problem(0)
    loss, _ = banded_p3o(groups, old, ref, rewards, kl_coef=KL_COEF)
    settings = P3OSettings(kl_coef=KL_COEF)
    ours = token_p3o_loss(
        groups.token_logprobs, groups.cu_seqlens, old, ref, rewards, settings, divisor=1
    )
    torch.testing.assert_close(
        gradient(loss, groups), gradient(ours.loss, groups), rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize("arm", ARMS)
def test_an_offset_per_prompt_changes_no_bit(arm):
    groups, old, ref, rewards = problem(1)
    rewards = (rewards * 1024).round() / 1024
    offsets = torch.arange(P, dtype=torch.float64)[:, None] * 1000.25
    objective = partial(banded_p3o, groups, old, ref, kl_coef=KL_COEF, **ARMS[arm])
    plain, shifted = (
        gradient(objective(given)[0], groups) for given in (rewards, rewards + offsets)
    )
    assert torch.equal(plain, shifted)


@pytest.mark.parametrize("arm", ARMS)
def test_at_the_old_policy_every_ratio_is_1_and_only_lengths_weigh_a_response(arm):
    groups, _, ref, rewards = problem(2)
    loss, metrics = banded_p3o(groups, groups.logprobs.detach(), ref, rewards, **ARMS[arm])
    centred = (rewards - rewards.mean(1, keepdim=True)) * K / math.comb(K, 2) / 2
    weights = (LENGTH / groups.lengths) ** ARMS[arm].get("division", 0.0)
    torch.testing.assert_close(gradient(loss, groups), groups.per_token(-centred * weights))
    assert metrics["clip_fraction"] == 0
    assert metrics["gradient_left"] == P


def test_all_arms_are_joint_p3o_where_all_responses_have_the_length_of_the_band():
    groups, old, ref, rewards = problem(3, torch.full((P * K,), int(LENGTH)))
    found = [
        gradient(banded_p3o(groups, old, ref, rewards, **settings)[0], groups)
        for settings in ARMS.values()
    ]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-15)


def test_a_response_without_tokens_gives_no_nan():
    groups, old, ref, rewards = problem(4, torch.tensor([0, 3, 40, 5] * P))
    for settings in ARMS.values():
        loss, _ = banded_p3o(groups, old, ref, rewards, **settings)
        assert gradient(loss, groups).isfinite().all()
