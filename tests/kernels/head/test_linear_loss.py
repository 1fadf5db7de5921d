import pytest
import torch

from fastp3o_kernels import linear_loss
from tests.kernels.levels import IMPLEMENTATIONS, Batch
from tests.kernels.problems import DEVICE


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_accumulation_equals_the_whole_batch_by_the_divisor(impl):
    batch = Batch("objective")
    whole, expected = batch.run(impl)
    leaves = batch.leaves()
    parts = ((slice(0, 1), 4.0), (slice(1, 4), torch.tensor(4.0, dtype=torch.float64)))
    total = sum(batch.output(leaves, prompts, impl=impl, divisor=divisor).loss for prompts, divisor in parts)
    torch.testing.assert_close(total, whole.loss)
    assert total.dtype == torch.float32
    torch.testing.assert_close(list(torch.autograd.grad(total, leaves)), expected)


@pytest.mark.parametrize("constant", [lambda groups: groups["weights"].sum(), lambda groups: groups.logprobs.sum() * 0])
def test_a_constant_objective_has_no_gradient(constant):
    batch, weights = Batch("objective"), torch.ones(8, device=DEVICE)
    leaves = batch.leaves()
    given = *leaves, batch.pairs.labels, batch.pairs.cu_seqlens, constant
    linear_loss(*given, group_tensors={"weights": weights}).loss.backward()
    assert not any(leaf.grad.any() for leaf in leaves)
