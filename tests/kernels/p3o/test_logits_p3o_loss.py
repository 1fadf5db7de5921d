import pytest
import torch

from tests.kernels.levels import Batch
from tests.kernels.problems import CLIPPINGS, DEVICE, random_pairs, relative_error


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_logits_of_scale_100_and_minus_infinity(clipping, impl):
    lengths = [3, 4, 1, 2]
    batch = Batch("logits", lengths, clipping=clipping)
    batch.pairs = pairs = random_pairs(lengths, 60, DEVICE, scale=100.0)
    pairs.logits[:, 50:] = -float("inf")
    pairs.labels %= 50
    logprobs = pairs.logits.double().log_softmax(-1).gather(1, pairs.labels[:, None]).squeeze(1)
    sums = torch.stack([part.sum() for part in logprobs.split(lengths)]).view(2, 2).float()
    pairs.old_logprobs, pairs.ref_logprobs, pairs.old_token_logprobs = sums + 0.05, sums, logprobs.float()
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
