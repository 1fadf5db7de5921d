import pytest
import torch

from fastp3o_kernels import P3OSettings, p3o_loss, sequence_logprobs, token_p3o_loss
from tests.kernels.levels import Batch
from tests.kernels.problems import CLIPPINGS, DEVICE, random_pairs, relative_error


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("K", [2, 16, 20])
def test_many_responses_of_very_different_lengths(clipping, K):
    """More pairs than a tile holds, and more tokens than a block."""
    torch.manual_seed(0)
    lengths = [1, 700, 3, 1, *torch.randint(1, 5, (36,)).tolist()]
    logprobs = -torch.rand(sum(lengths), device=DEVICE)
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=torch.int32)[
        : 40 // K * K + 1
    ]
    logprobs = logprobs[: cu_seqlens[-1]]
    sums = sequence_logprobs(logprobs, cu_seqlens, impl="eager").view(-1, K)
    rest = (
        (sums + 0.3 * torch.randn_like(sums)).clamp(max=0),
        (sums + torch.randn_like(sums)).clamp(max=0),
        torch.randn_like(sums),
    )
    old_token_logprobs = (
        logprobs + 0.3 * torch.randn_like(logprobs) if clipping == "token" else None
    )
    settings = P3OSettings(clipping=clipping)

    def run(impl, dtype):
        leaf = logprobs.to(dtype).requires_grad_()
        old = None if old_token_logprobs is None else old_token_logprobs.to(dtype)
        pairs = [tensor.to(dtype) for tensor in rest]
        output = token_p3o_loss(
            leaf, cu_seqlens, *pairs, settings, old_token_logprobs=old, impl=impl
        )
        output.loss.backward()
        return output.loss.detach(), leaf.grad

    expected, expected_gradient = run("eager", torch.float64)
    loss, gradient = run("triton", torch.float32)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-4)
    assert relative_error(gradient, expected_gradient) < 1e-3


@pytest.mark.parametrize("clipping", ["joint", "separate", "none"])
@pytest.mark.parametrize("far", [1e4, -1e4])
def test_ratios_never_overflow(clipping, far, impl):
    batch = Batch("responses", clipping=clipping)
    batch.logprobs = batch.logprobs + far
    output, (gradient,) = batch.run(impl)
    assert output.loss.isfinite()
    assert gradient.isfinite().all()
    assert all(value.isfinite() for value in output.metrics.values())


def test_a_policy_that_went_too_far_the_right_way_has_no_gradient(impl):
    """Response 1 is better and already preferred by more than the clip range; response 2 of pair 1
    likewise.
    """
    old = torch.full((2, 2), -10.0, device=DEVICE)
    logprobs = old + torch.tensor([[0.5, 0.0], [0.5, 0.0]], device=DEVICE)
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=DEVICE)
    output = p3o_loss(
        logprobs.requires_grad_(), old, old, rewards, P3OSettings(kl_coef=0.0), impl=impl
    )
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    assert (gradient[0] == 0).all()
    assert gradient[1, 0] > 0 > gradient[1, 1]
    assert output.metrics["zero_gradient_fraction"] == 0.5
    assert output.metrics["clip_fraction"] == output.metrics["advantage_mean_abs"] == 1
    assert output.metrics["ratio_max"].log().item() == pytest.approx(0.5)
    assert output.metrics["kl"].item() == pytest.approx(0.25)


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_logits_of_scale_100_and_minus_infinity(clipping, impl):
    lengths = [3, 4, 1, 2]
    batch = Batch("logits", lengths, clipping=clipping)
    batch.pairs = pairs = random_pairs(lengths, 60, DEVICE, scale=100.0)
    pairs.logits[:, 50:] = -float("inf")
    pairs.labels %= 50
    logprobs = pairs.logits.double().log_softmax(-1).gather(1, pairs.labels[:, None]).squeeze(1)
    sums = torch.stack([part.sum() for part in logprobs.split(lengths)]).view(2, 2).float()
    pairs.old_logprobs, pairs.ref_logprobs, pairs.old_token_logprobs = (
        sums + 0.05,
        sums,
        logprobs.float(),
    )
    expected, (target,) = batch.to(torch.float64).run("eager")
    output, (gradient,) = batch.run(impl)
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-3, abs=1e-2)
    assert gradient.isfinite().all()
    assert relative_error(gradient, target) < 2e-3


def test_rows_without_gradient_are_not_read_in_backward():
    batch = Batch("logits", [3, 4, 2, 2], clipping="none", kl_coef=0.0)
    batch.pairs.rewards[0] = 1.0
    (logits,) = leaves = batch.leaves()
    output = batch.output(leaves, impl="triton")
    logits.data[:7] = float("nan")
    output.loss.backward()
    assert (logits.grad[:7] == 0).all()
    assert (logits.grad[7:] != 0).any()
    assert output.metrics["zero_gradient_fraction"] == 0.5
