"""Gates, in Triton's interpreter where there is no GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o_kernels.layers import ACTIVATIONS, gated
from fastp3o_kernels.layers.gate_kernel import BLOCK
from tests.kernels.interpreted import counted_launches, counted_traffic
from tests.kernels.layers.exactness import DTYPES, check
from tests.kernels.problems import DEVICE, EXAMPLES


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    shape=st.sampled_from([(1,), (3, 5), (1, 7, 33), (BLOCK + 1,)]),
    activation=st.sampled_from(list(ACTIVATIONS)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
)
def test_values_and_gradients(shape, activation, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    gate, up, grad = (torch.randn(shape, generator=generator).to(DEVICE) for _ in range(3))
    inputs = [(4 * gate).to(dtype), up.to(dtype)]
    check(lambda gate, up, impl: (gated(gate, up, activation, impl=impl),), inputs, [grad])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_from_zero(activation):
    gate = torch.tensor(
        [-300.0, -88.0, -20.0, -6.0, -1e-6, 0.0, 1e-6, 6.0, 20.0, 88.0, 300.0], device=DEVICE
    )
    check(
        lambda g, up, impl: (gated(g, up, activation, impl=impl),),
        [gate, gate.flip(0)],
        [torch.ones_like(gate)],
    )


@pytest.mark.parametrize(
    "cut",
    [
        lambda both: both.chunk(2, 2),
        lambda both: both.split([24, 24], dim=2)[::-1],
        lambda both: (both[..., ::2], both[..., 1::2]),
        lambda both: (both[:, :, :24], both[:, :1, 24:].expand(3, 4, 24)),
        lambda both: (both[:, :, :24].transpose(0, 1), both[:, :, 24:].transpose(0, 1)),
        lambda both: (both[:, :, :24].contiguous(), both[:, :, 24:]),
    ],
    ids=["halves", "halves turned", "neighbors", "expanded", "transposed", "one contiguous"],
)
def test_any_strides(cut):
    both, grad = (
        torch.randn(3, 4, 2 * 24, device=DEVICE).requires_grad_(),
        torch.randn(1, device=DEVICE),
    )
    results = []
    for impl in ("triton", "eager"):
        result = gated(*cut(both), "silu", impl=impl)
        results.append((result, *torch.autograd.grad((grad * result).sum(), both)))
    torch.testing.assert_close(*results)


def test_views_of_one_product_are_not_copied(monkeypatch):
    gate, up = torch.randn(3, 2 * (BLOCK + 32), device=DEVICE).chunk(2, 1)
    with counted_traffic(monkeypatch) as traffic, counted_launches(monkeypatch) as launches:
        result = gated(gate, up, "silu", impl="triton")
    assert (launches.total(), traffic.memory) == (1, 3 * result.nbytes)
    torch.testing.assert_close(result, gated(gate, up, "silu", impl="eager"))


def test_launches_and_bytes(monkeypatch):
    gate, up = (
        torch.randn(BLOCK + 32, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
        for _ in range(2)
    )
    with counted_traffic(monkeypatch) as traffic, counted_launches(monkeypatch) as launches:
        result = gated(gate, up, "silu", impl="triton")
    assert (launches.total(), traffic.memory) == (1, 3 * gate.nbytes)
    with counted_traffic(monkeypatch) as traffic, counted_launches(monkeypatch) as launches:
        result.backward(torch.ones_like(result))
    assert (launches.total(), traffic.memory) == (1, 5 * gate.nbytes)


def test_bad_input():
    x = torch.ones(2, 4)
    with pytest.raises(
        ValueError, match="activation must be one of silu, gelu_tanh, gelu, got 'relu'"
    ):
        gated(x, x, "relu")
    with pytest.raises(ValueError, match=r"up must have shape \[2, 4\]"):
        gated(x, x[:, :2], "silu")
    with pytest.raises(ValueError, match="up must have the gate's dtype"):
        gated(x, x.half(), "silu")
