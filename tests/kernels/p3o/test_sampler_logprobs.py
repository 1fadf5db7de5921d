"""Pairs of another sampler than the old policy have truncated importance weights."""

from dataclasses import replace
from math import exp

import pytest
import torch

from tests.kernels.levels import Batch
from tests.kernels.problems import CLIPPINGS, DEVICE

LENGTHS = [3, 1, 4, 2, 2, 5]


def weighted(clipping: str, impl: str, apart=None, cap=2.0, valid=None) -> tuple:
    """Loss, gradient, metrics of two prompts with three responses each. apart: log π_old − log μ;
    None if not known.
    """
    batch = Batch("tokens", LENGTHS, K=3, clipping=clipping)
    batch.settings, batch.pairs.valid_responses = (
        replace(batch.settings, sampler_ratio_cap=cap),
        valid,
    )
    if apart is not None:
        batch.pairs.sampler_logprobs = batch.pairs.old_logprobs - apart
    output, (gradient,) = batch.run(impl)
    return output.loss.detach(), gradient, output.metrics


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_weights_of_the_old_policy_itself_change_no_bit(clipping, impl):
    loss, gradient, metrics = weighted(clipping, impl)
    weighted_loss, weighted_gradient, found = weighted(clipping, impl, 0.0)
    assert torch.equal(loss, weighted_loss)
    assert torch.equal(gradient, weighted_gradient)
    assert found == metrics | {"sampler_ratio_mean": 1, "sampler_ratio_capped": 0}


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("far", [3.0, 1e4, 3e38])
def test_weights_end_at_the_cap_and_at_nothing_however_far_apart(clipping, far, impl):
    loss, gradient, _ = weighted(clipping, impl)
    up_loss, up_gradient, up = weighted(clipping, impl, far, cap=4.0)
    torch.testing.assert_close(
        (up_loss, up_gradient), (4 * loss, 4 * gradient), rtol=1e-5, atol=1e-6
    )
    assert up["sampler_ratio_mean"] == 4
    assert up["sampler_ratio_capped"] == 1
    down_loss, down_gradient, down = weighted(clipping, impl, -far)
    share = exp(-2 * far)
    torch.testing.assert_close(
        (down_loss, down_gradient), (share * loss, share * gradient), rtol=1e-4, atol=1e-20
    )
    assert down["sampler_ratio_capped"] == 0


def test_metrics_are_of_the_capped_products_of_the_ratios_of_valid_pairs(impl):
    """The first prompt's second response takes no part, and nothing is known of it."""
    valid = torch.tensor([[True, False, True], [True, True, True]], device=DEVICE)
    apart = torch.tensor([[0.3, float("nan"), -0.1], [0.5, 0.4, -2.0]], device=DEVICE)
    _, _, metrics = weighted("joint", impl, apart, valid=valid)
    weights = [exp(0.2), min(exp(0.9), 2), exp(-1.5), exp(-1.6)]
    assert metrics["sampler_ratio_mean"].item() == pytest.approx(sum(weights) / 4, rel=1e-5)
    assert metrics["sampler_ratio_capped"].item() == 0.25
