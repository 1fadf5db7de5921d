import pytest
import torch

from fastp3o_kernels import P3OSettings, logits_p3o_loss
from tests.kernels.levels import Batch
from tests.kernels.problems import CLIPPINGS, DEVICE, random_pairs, relative_error


def run(pairs, clipping, impl):
    logits = pairs.logits.detach().requires_grad_()
    output = pairs.call(logits_p3o_loss, logits, P3OSettings(clipping=clipping), impl=impl)
    output.loss.backward()
    return output, logits.grad


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_logits_of_scale_100_and_minus_infinity(clipping, impl):
    pairs = random_pairs([3, 4, 1, 2], 60, DEVICE, scale=100.0)
    pairs.logits[:, 50:] = -float("inf")
    pairs.labels %= 50
    with torch.no_grad():
        logprobs = pairs.logits.double().log_softmax(-1).gather(1, pairs.labels[:, None]).squeeze(1)
        sums = torch.stack([part.sum() for part in logprobs.split([3, 4, 1, 2])]).view(2, 2).float()
    pairs.old_logprobs, pairs.ref_logprobs, pairs.old_token_logprobs = sums + 0.05, sums, logprobs.float()
    expected, expected_gradient = run(pairs.to(torch.float64), clipping, "eager")
    output, gradient = run(pairs, clipping, impl)
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-3, abs=1e-2)
    assert gradient.isfinite().all()
    assert relative_error(gradient, expected_gradient) < 2e-3


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


def test_in_place_backward_gives_the_same():
    pairs = random_pairs([3, 4], 40, DEVICE)
    _, expected = run(pairs, "joint", "triton")
    logits = pairs.logits.clone().requires_grad_() * 1.0
    logits.retain_grad()
    output = pairs.call(logits_p3o_loss, logits, P3OSettings(), impl="triton", inplace_backward=True)
    output.loss.backward(retain_graph=True)
    assert torch.equal(logits.grad, expected)
    assert torch.equal(logits, expected)
    with pytest.raises(RuntimeError):
        output.loss.backward()
