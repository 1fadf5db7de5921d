import pytest
import torch

from fastp3o_kernels import Groups, linear_loss
from tests.kernels.levels import IMPLEMENTATIONS, Batch
from tests.kernels.problems import CHUNKED, DEVICE, budget_for


@pytest.mark.parametrize("K", [2, 3])
@pytest.mark.parametrize("impl", CHUNKED)
def test_p3o_as_an_objective_is_linear_p3o_loss(impl, K):
    batch = Batch("hidden", [3, 5, 1, 4, 2, 6], 30, K=K)
    pairs, p3o = batch.pairs, batch.settings

    def joint(groups: Groups):
        u, change = groups.logprobs - groups["ref"], groups.logprobs - groups["old"]
        q = (groups["rewards"] - p3o.kl_coef * u).detach()
        i, j = torch.triu_indices(K, K, offset=1)
        difference, moved = u[:, i] - u[:, j], change[:, i] - change[:, j]
        c = (change[:, i] + change[:, j]).exp().clamp(1 / p3o.ratio_cap, p3o.ratio_cap).detach()
        weight = -(q[:, i] - q[:, j]) * c
        clipped = difference - moved + moved.clamp(-p3o.clip_range, p3o.clip_range)
        return torch.maximum(weight * difference, weight * clipped).mean(1).sum() / 2

    expected, targets = batch.run(impl, incoming=2.0)
    tensors = {"old": pairs.old_logprobs, "ref": pairs.ref_logprobs, "rewards": pairs.rewards}
    leaves = batch.leaves()
    given = *leaves, pairs.labels, pairs.cu_seqlens, joint
    options = {"responses_per_group": K, "response_tensors": tensors, "memory_budget": budget_for(7, 30)}
    loss, _ = linear_loss(*given, **options, impl=impl)
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(list(torch.autograd.grad(2 * loss, leaves)), targets, rtol=1e-4, atol=1e-6)


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
