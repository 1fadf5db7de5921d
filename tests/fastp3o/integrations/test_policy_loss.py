"""P3O from padded log-probabilities, as verl's and OpenRLHF's actors pass them."""

from importlib import import_module, metadata

import pytest
import torch

from fastp3o.integrations.policy_loss import p3o_policy_loss
from fastp3o_kernels import P3OSettings, p3o_loss

B, C = 6, 5
LENGTHS = torch.tensor([5, 3, 1, 4, 2, 5])
MASK = torch.arange(C) < LENGTHS[:, None]
SETTINGS = P3OSettings(kl_coef=0.0)


def problem(K: int) -> list[torch.Tensor]:
    """Log-probs, old ones and centred advantages, arbitrary beyond a response's end."""
    generator = torch.Generator().manual_seed(K)
    logprobs, old = -torch.rand(2, B, C, generator=generator, dtype=torch.float64)
    advantages = torch.randn(B // K, K, generator=generator, dtype=torch.float64)
    advantages = (advantages - advantages.mean(1, keepdim=True)).view(B, 1).expand(B, C) * MASK
    return [
        logprobs.masked_fill(~MASK, 9.0).requires_grad_(),
        old.masked_fill(~MASK, -9.0),
        advantages,
    ]


@pytest.mark.parametrize("K", [2, 3])
def test_it_is_p3o_loss_of_the_responses_also_in_microbatches(K):
    logprobs, old, advantages = problem(K)
    loss, metrics = p3o_policy_loss(logprobs, old, advantages, MASK, K, SETTINGS)
    sums = [(values * MASK).sum(1).view(-1, K) for values in (logprobs, old)]
    expected = p3o_loss(sums[0], sums[1], sums[1], advantages[:, 0].view(-1, K), SETTINGS)
    torch.testing.assert_close(loss, expected.loss)
    found, gradient = (torch.autograd.grad(value, logprobs)[0] for value in (loss, expected.loss))
    assert gradient.any()
    torch.testing.assert_close(found, gradient)
    assert metrics["p3o/clip_fraction"] == pytest.approx(expected.metrics["clip_fraction"].item())
    rows = [slice(first, first + K) for first in range(0, B, K)]
    parts = [
        p3o_policy_loss(
            *(values[row] for values in (logprobs, old, advantages, MASK)),
            K,
            SETTINGS,
            divisor=B / K,
        )
        for row in rows
    ]
    torch.testing.assert_close(sum(part for part, _ in parts), loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_logprobs_of_any_dtype_have_a_ratio_of_one(dtype):
    """The microbatch has 200 positions, and is NaN beyond the ends of responses."""
    lengths = torch.tensor([200, 150, 90, 199])
    mask = torch.arange(200) < lengths[:, None]
    logprobs = -4 * torch.rand(4, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    logprobs.masked_fill_(~mask, float("nan"))
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None].expand(4, 200)
    loss, metrics = p3o_policy_loss(
        logprobs.requires_grad_(), logprobs, advantages, mask, 2, SETTINGS
    )
    assert metrics["p3o/ratio_mean"] == 1
    assert metrics["p3o/kl"] == 0
    assert loss.isfinite()


def test_parted_siblings_a_second_kl_and_other_versions_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="no multiple of the 4"):
        p3o_policy_loss(*problem(2), MASK, 4, SETTINGS)
    with pytest.raises(ValueError, match="kl_coef must be 0"):
        p3o_policy_loss(*problem(2), MASK, 2, P3OSettings())
    monkeypatch.setattr(metadata, "version", lambda package: "0.8.0")
    for host, versions in (("verl", "0.9.0 and 0.9.1"), ("openrlhf", "0.11.1 and 0.11.2")):
        with pytest.raises(
            ImportError, match=rf"(?i)for {host} {versions}, and 0\.8\.0 is installed"
        ):
            import_module(f"fastp3o.integrations.{host}")
