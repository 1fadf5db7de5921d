"""Rotary positions, in Triton's interpreter where there is no GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o_kernels.layers import rotate
from tests.kernels.interpreted import counted_launches, counted_traffic
from tests.kernels.layers.exactness import DTYPES, check
from tests.kernels.problems import DEVICE, EXAMPLES


def problem(T, H, HKV, D, R, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query, key = (
        torch.randn(T, heads, D, generator=generator).to(DEVICE, dtype) for heads in (H, HKV)
    )
    # Angles of no pattern: each element's counts.
    angles = 6.3 * torch.rand(T, R, generator=generator).to(DEVICE)
    return query, key, angles.cos().to(dtype), angles.sin().to(dtype)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    T=st.sampled_from([1, 2, 9]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (7, 7)]),
    sizes=st.sampled_from([(2, 2), (16, 16), (20, 20), (16, 8), (20, 6)]),
    interleaved=st.booleans(),
    precise=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
)
def test_values_and_gradients(T, heads, sizes, interleaved, precise, dtype, seed):
    query, key, cos, sin = problem(T, *heads, *sizes, dtype, seed)
    if precise:
        cos, sin = cos.float(), sin.float()
    grads = [torch.randn_like(query), torch.randn_like(key)]

    def compute(query, key, impl):
        angles = (
            tensor.to(torch.promote_types(tensor.dtype, query.dtype)) for tensor in (cos, sin)
        )
        return rotate(query, key, *angles, interleaved=interleaved, impl=impl)

    check(compute, [query, key], grads)


@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_lie_at_any_stride(interleaved):
    query, key, cos, sin = problem(5, 4, 2, 8, 8)
    both = torch.cat([query, key], 1)
    apart = both.transpose(0, 1).contiguous().transpose(0, 1)
    views = both[:, :4], apart[:, 4:]
    for got, expected in zip(
        rotate(*views, cos, sin, interleaved=interleaved, impl="triton"),
        rotate(query, key, cos, sin, interleaved=interleaved, impl="eager"),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


def test_turned_back_by_the_opposite_angles():
    query, key, cos, sin = problem(3, 2, 1, 16, 16)
    cos, sin = (torch.cat([half, half], 1) for half in (cos[:, :8], sin[:, :8]))
    back = rotate(*rotate(query, key, cos, sin, impl="triton"), cos, -sin, impl="triton")
    scale = cos.square() + sin.square()
    torch.testing.assert_close(back[0], query * scale[:, None])


def test_launches_and_bytes(monkeypatch):
    query, key, cos, sin = problem(6, 4, 2, 32, 32, torch.bfloat16)
    query.requires_grad_()
    key.requires_grad_()
    least = 2 * (query.nbytes + key.nbytes) + cos.nbytes + sin.nbytes
    with counted_traffic(monkeypatch) as traffic, counted_launches(monkeypatch) as launches:
        results = rotate(query, key, cos, sin, impl="triton")
    assert (launches.total(), traffic.memory) == (1, least)
    with counted_traffic(monkeypatch) as traffic, counted_launches(monkeypatch) as launches:
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    assert (launches.total(), traffic.memory) == (1, least)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.ones(3, 1, 8)}, r"key must have shape \[2, 1, 8\]"),
        ({"key": torch.ones(2, 1, 8).half()}, "key must have the queries' dtype"),
        (
            {"cos": torch.ones(2, 3), "sin": torch.ones(2, 3)},
            "cos must have an even number of columns, 8 at most, got 3",
        ),
        ({"sin": torch.ones(2, 2)}, r"sin must have shape \[2, 8\]"),
        ({"query": torch.ones(2, 1, 8, dtype=torch.int64)}, "query must be of a floating dtype"),
    ],
)
def test_bad_input(change, message):
    inputs = {
        "query": torch.ones(2, 4, 8),
        "key": torch.ones(2, 1, 8),
        "cos": torch.ones(2, 8),
        "sin": torch.ones(2, 8),
    }
    with pytest.raises(ValueError, match=message):
        rotate(**inputs | change)
