"""The gradient of a head's bias: a sum over all tokens, whose terms cancel."""

import pytest
import torch

from fastp3o_kernels import Head, linear_logprobs
from tests.kernels.levels import Batch
from tests.kernels.problems import (
    CHUNKED,
    DEVICE,
    budget_for,
    multiplied_as,
    random_hidden_states,
    relative_error,
)
from tests.pairwise import pairwise

FLOATING = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
N, V = 300, 67


def bias_gradient(states, bias, labels, weights, entropies, impl, **given):
    bias = bias.detach().clone().requires_grad_()
    head = Head(states.weight, bias=bias, softcap=states.softcap, temperature=0.8)
    values = linear_logprobs(states.hidden, head, labels, outputs=("entropy",), impl=impl, **given)
    loss = (values.logprobs * weights).sum()
    if entropies is not None:
        loss = loss + (values.entropy * entropies).sum()
    (gradient,) = torch.autograd.grad(loss, bias)
    assert gradient.dtype == bias.dtype
    return gradient


@pytest.mark.parametrize(
    ("impl", "dtype", "of_bias", "arithmetic", "softcap", "entropy", "held"),
    pairwise(
        CHUNKED,
        FLOATING,
        FLOATING,
        ["gpu", "bf16", "widened"],
        [None, 6.0],
        [False, True],
        [2000, 64, 5],
    ),
)
def test_it_is_summed_before_gradients_of_logits_are_rounded(
    impl, dtype, of_bias, arithmetic, softcap, entropy, held
):
    """Terms of both signs leave a sum that is small next to the roundings of half precision."""
    if impl == "triton" and torch.float64 in (dtype, of_bias):
        impl = None
    states = random_hidden_states(N, V, 8, DEVICE, dtype, softcap=softcap)
    torch.manual_seed(0)
    bias, labels = torch.randn(V, device=DEVICE).to(of_bias), torch.randint(V, (N,), device=DEVICE)
    labels[::9] = -100
    weights, entropies = torch.randn(2, N, dtype=torch.float64, device=DEVICE)
    weights[5:20] = 0
    numbers = (
        labels,
        weights.to(at_least := torch.promote_types(dtype, torch.float32)),
        entropies.to(at_least),
    )
    expected = bias_gradient(
        states.to(torch.float64),
        bias.double(),
        labels,
        weights,
        entropies if entropy else None,
        "eager",
    )
    given = {"memory_budget": budget_for(held, V)}
    with multiplied_as(arithmetic, dtype):
        found = bias_gradient(
            states, bias, *numbers[:2], numbers[2] if entropy else None, impl, **given
        )
    # Half a unit in the last place of what it is given in, and what fp32 loses.
    assert relative_error(found, expected) <= torch.finfo(of_bias).eps / 2 + 2e-6


@pytest.mark.parametrize("impl", CHUNKED)
@pytest.mark.parametrize("level", ["hidden", "objective"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_losses_sum_it_in_fp32_over_chunks(level, impl, half):
    batch = Batch(level, [20, 12, 3, 40, 9, 1, 0, 30], 67, dtype=half, clipping="none", bias=True)
    *_, expected = batch.to(torch.float64).run("eager")[1]
    batch.states.bias = batch.states.bias.float()
    with multiplied_as("gpu", half):
        *_, found = batch.run(impl, memory_budget=budget_for(30, 67))[1]
    assert found.dtype == torch.float32
    assert relative_error(found, expected) < 1e-4
