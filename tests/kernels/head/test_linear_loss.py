import pytest
import torch

from fastp3o_kernels import linear_logprobs, linear_loss
from tests.kernels.levels import IMPLEMENTATIONS, Batch
from tests.kernels.problems import DEVICE, budget_for


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_accumulation_equals_the_whole_batch_by_the_divisor(impl):
    batch = Batch("objective")
    whole, expected = batch.run(impl)
    leaves = batch.leaves()
    parts = ((slice(0, 1), 4.0), (slice(1, 4), torch.tensor(4.0, dtype=torch.float64)))
    total = sum(
        batch.output(leaves, prompts, impl=impl, divisor=divisor).loss for prompts, divisor in parts
    )
    torch.testing.assert_close(total, whole.loss)
    assert total.dtype == torch.float32
    torch.testing.assert_close(list(torch.autograd.grad(total, leaves)), expected)


def test_an_objective_that_weighs_everything_by_0_has_no_gradient():
    batch = Batch("objective")
    leaves = batch.leaves()
    given = (
        *leaves,
        batch.pairs.labels,
        batch.pairs.cu_seqlens,
        lambda groups: groups.logprobs.sum() * 0,
    )
    linear_loss(*given).loss.backward()
    assert not any(leaf.grad.any() for leaf in leaves)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_an_objective_that_is_no_sum_over_its_groups_is_told_on_request(impl, monkeypatch):
    batch = Batch("objective")
    given = *batch.leaves(), batch.pairs.labels, batch.pairs.cu_seqlens

    def mean(groups):
        return groups.token_logprobs.mean()

    linear_loss(*given, mean, impl=impl)
    batch.run(impl)
    monkeypatch.setenv("FASTP3O_DEBUG", "1")
    with pytest.raises(ValueError, match=r"must be a sum over its groups.* End in \.sum\(\)"):
        linear_loss(*given, mean, impl=impl)
    expected = linear_loss(*given, lambda groups: groups.logprobs.square().sum(), impl=impl)
    monkeypatch.delenv("FASTP3O_DEBUG")
    unchecked = linear_loss(*given, lambda groups: groups.logprobs.square().sum(), impl=impl)
    assert torch.equal(expected.loss, unchecked.loss)


@pytest.mark.parametrize(
    "constant",
    [lambda groups: groups["weights"].sum(), lambda groups: groups.logprobs.sum().detach()],
)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_an_objective_without_a_gradient_is_refused_where_one_is_wanted(impl, constant):
    batch, weights = Batch("objective"), torch.ones(8, device=DEVICE)
    given = *batch.leaves(), batch.pairs.labels, batch.pairs.cu_seqlens, constant
    with pytest.raises(ValueError, match="the objective's result has no gradient: it is detached"):
        linear_loss(*given, group_tensors={"weights": weights}, impl=impl)
    with torch.no_grad():
        linear_loss(*given, group_tensors={"weights": weights}, impl=impl)


@pytest.mark.parametrize("level", ["objective", "hidden", "hidden, its own"])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_loss_leaves_the_log_probs_that_it_has_computed(impl, level):
    """Also where it is computed in parts, and where nothing needs a gradient; loss and gradients
    stay the same.
    """
    batch = Batch(level)
    expected, gradients = batch.run(impl)
    states = batch.states
    logprobs = linear_logprobs(states.hidden, states.head, batch.pairs.labels, impl=impl).detach()
    for options in ({}, {"memory_budget": budget_for(10, 50)}):
        out = torch.full_like(logprobs, torch.nan)
        output, found = batch.run(impl, logprobs_out=out, **options)
        torch.testing.assert_close(out, logprobs)
        torch.testing.assert_close(output.loss, expected.loss)
        torch.testing.assert_close(found, gradients)
    out = torch.full_like(logprobs, torch.nan)
    with torch.no_grad():
        batch.output(batch.leaves(), impl=impl, logprobs_out=out)
    torch.testing.assert_close(out, logprobs)


@pytest.mark.parametrize("level", ["objective", "hidden"])
@pytest.mark.parametrize(
    ("out", "says"),
    [
        (lambda N: torch.empty(N + 1), "logprobs_out must have shape"),
        (
            lambda N: torch.empty(N, dtype=torch.bfloat16),
            "logprobs_out must be fp32 or fp64, got torch.bfloat16",
        ),
    ],
    ids=["shape", "dtype"],
)
def test_room_for_log_probs_that_would_not_hold_them_is_refused(level, out, says):
    batch = Batch(level)
    with pytest.raises(ValueError, match=says):
        batch.run(logprobs_out=out(len(batch.pairs.labels)).to(DEVICE))
