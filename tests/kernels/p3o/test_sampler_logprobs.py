"""Pairs of another sampler than the old policy have truncated importance weights."""

from itertools import product
from math import exp

import pytest
import torch

from fastp3o_kernels import P3OLossOutput, P3OSettings, p3o_loss, token_p3o_loss
from tests.kernels.problems import CLIPPINGS, DEVICE

LENGTHS = [3, 1, 4, 2, 2, 5]
P, K = 2, 3


def values(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def run(clipping: str, impl: str, sampler_logprobs=None, old=None, *, cap=2.0, valid=None) -> tuple:
    """Loss, gradient and metrics of two prompts with three responses each."""
    tokens = (values(sum(LENGTHS), seed=1) - 2).requires_grad_()
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    own = torch.stack([part.sum() for part in tokens.detach().split(LENGTHS)]).view(P, K)
    old_tokens = tokens.detach() + values(sum(LENGTHS), seed=2, scale=0.3) if clipping == "token" else None
    output = token_p3o_loss(
        tokens,
        cu_seqlens,
        known_old(own) if old is None else old,
        own + values(P, K, seed=4),
        values(P, K, seed=5),
        P3OSettings(clipping=clipping, sampler_ratio_cap=cap),
        old_token_logprobs=old_tokens,
        valid_responses=valid,
        sampler_logprobs=sampler_logprobs,
        impl=impl,
    )
    output.loss.backward()
    return output.loss.detach(), tokens.grad, output.metrics


def known_old(own: torch.Tensor) -> torch.Tensor:
    return own + values(P, K, seed=3, scale=0.3)


def old_logprobs() -> torch.Tensor:
    tokens = values(sum(LENGTHS), seed=1) - 2
    return known_old(torch.stack([part.sum() for part in tokens.split(LENGTHS)]).view(P, K))


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_weights_of_the_old_policy_itself_change_no_bit(clipping, impl):
    loss, gradient, metrics = run(clipping, impl)
    weighted_loss, weighted_gradient, weighted = run(clipping, impl, old_logprobs())
    assert torch.equal(loss, weighted_loss)
    assert torch.equal(gradient, weighted_gradient)
    assert {name: weighted.pop(name) for name in ("sampler_ratio_mean", "sampler_ratio_capped")} == {
        "sampler_ratio_mean": 1,
        "sampler_ratio_capped": 0,
    }
    assert metrics == weighted


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("far", [3.0, 100.0, 1e4, 3e38])
def test_weights_end_at_the_cap_and_at_nothing_however_far_apart(clipping, far, impl):
    loss, gradient, _ = run(clipping, impl)
    up_loss, up_gradient, up = run(clipping, impl, old_logprobs() - far, cap=4.0)
    torch.testing.assert_close(up_loss, 4 * loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(up_gradient, 4 * gradient, rtol=1e-5, atol=1e-6)
    assert up["sampler_ratio_mean"] == 4
    assert up["sampler_ratio_capped"] == 1
    down_loss, down_gradient, down = run(clipping, impl, old_logprobs() + far)
    torch.testing.assert_close(down_loss, exp(-2 * far) * loss, rtol=1e-4, atol=1e-20)
    torch.testing.assert_close(down_gradient, exp(-2 * far) * gradient, rtol=1e-4, atol=1e-20)
    assert down["sampler_ratio_capped"] == 0


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_pair_has_the_capped_product_of_its_responses_ratios(clipping, impl):
    """The first prompt's second response takes no part, and nothing is known of it."""
    valid = torch.tensor([[True, False, True], [True, True, True]], device=DEVICE)
    old = old_logprobs()
    sampler = old - torch.tensor([[0.3, 0.0, -0.1], [0.5, 0.4, -2.0]], device=DEVICE)
    old[0, 1], sampler[0, 1] = float("nan"), float("nan")
    loss, gradient, metrics = run(clipping, impl, sampler, old, valid=valid)
    weights = [exp(0.2), min(exp(0.9), 2), exp(-1.5), exp(-1.6)]
    assert metrics["sampler_ratio_mean"].item() == pytest.approx(sum(weights) / 4, rel=1e-5)
    assert metrics["sampler_ratio_capped"].item() == 0.25
    total, expected = 0.0, torch.zeros_like(gradient)
    for (prompt, first, second), weight in zip([(0, 0, 2), (1, 0, 1), (1, 0, 2), (1, 1, 2)], weights, strict=True):
        alone = torch.zeros_like(valid)
        alone[prompt, [first, second]] = True
        pair_loss, pair_gradient, _ = run(clipping, impl, None, old, valid=alone)
        used = alone.flatten().repeat_interleave(torch.tensor(LENGTHS, device=DEVICE))
        total, expected = total + weight * pair_loss, expected + weight * pair_gradient.where(used, 0.0)
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=1e-6)
    counted = valid.flatten().repeat_interleave(torch.tensor(LENGTHS, device=DEVICE))
    torch.testing.assert_close(gradient.where(counted, 0.0), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clipping", ["joint", "separate", "none"])
def test_without_a_cap_the_mean_over_the_samplers_pairs_is_that_over_the_old_policys(clipping):
    """Over all pairs of four possible responses, by their probabilities, in fp64."""
    logprobs, old, sampler, ref = (values(4, seed=seed).double().log_softmax(0) for seed in range(4))
    rewards, cap = values(4, seed=5).double(), 1e9

    def mean(weighted: bool) -> tuple[torch.Tensor, torch.Tensor]:
        leaf, behaviour = logprobs.clone().requires_grad_(), sampler if weighted else old
        total = torch.zeros((), dtype=torch.float64, device=DEVICE)
        for pair in map(list, product(range(4), range(4))):
            given = [tensor[pair][None] for tensor in (leaf, old, ref, rewards)]
            settings = P3OSettings(clipping=clipping, sampler_ratio_cap=cap)
            output = p3o_loss(*given, settings, sampler_logprobs=sampler[pair][None] if weighted else None)
            total = total + behaviour[pair].sum().exp() * output.loss
        total.backward()
        return total.detach(), leaf.grad

    for found, expected in zip(mean(weighted=True), mean(weighted=False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_no_gradient_reaches_the_weights(impl):
    logprobs, old, sampler = (values(P, 2, seed=seed).requires_grad_() for seed in range(3))
    output = p3o_loss(logprobs, old, values(P, 2, seed=3), values(P, 2, seed=4), sampler_logprobs=sampler, impl=impl)
    output.loss.backward()
    assert logprobs.grad.any()
    assert old.grad is None
    assert sampler.grad is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(P, 3), r"sampler_logprobs must have shape \[2, 2\] \(a row for each prompt\), got \[2, 3\]"),
        (torch.zeros(P, 2, dtype=torch.long), "sampler_logprobs must be of a floating dtype, got torch.int64"),
        (torch.tensor([[0.0, float("nan")], [0.0, 0.0]]), r"sampler_logprobs\[0, 1\] is NaN"),
    ],
)
def test_what_is_wrong_is_named(wrong, message, monkeypatch):
    monkeypatch.setenv("FASTP3O_DEBUG", "1")  # without it nobody looks at values on a GPU
    with pytest.raises(ValueError, match=message):
        p3o_loss(*(values(P, 2, seed=seed) for seed in range(4)), sampler_logprobs=wrong.to(DEVICE))


def test_nothing_to_weigh_has_metrics_of_zero(impl):
    nothing = torch.zeros(0, 2, device=DEVICE)
    output: P3OLossOutput = p3o_loss(*[nothing] * 4, sampler_logprobs=nothing, impl=impl)
    assert output.loss == output.metrics["sampler_ratio_mean"] == output.metrics["sampler_ratio_capped"] == 0
