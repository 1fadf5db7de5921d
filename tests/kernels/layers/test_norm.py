"""RMS norms with the residual stream, in Triton's interpreter where there is no GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o_kernels.layers import NormKind, add_and_norm, norm_and_add, rms_norm
from fastp3o_kernels.layers.norm_kernel import PROGRAMS, TILE
from tests.kernels.interpreted import counted_launches, counted_traffic
from tests.kernels.layers.exactness import DTYPES, check
from tests.kernels.problems import DEVICE, EXAMPLES

LLAMA, GEMMA = NormKind(1e-6), NormKind(1e-5, offset=1.0, rounds=False)
KINDS = [LLAMA, GEMMA, NormKind(1e-3, rounds=False)]


def problem(rows, D, dtype=torch.float32, seed=0, *, count=1):
    """Rows of sizes from 1e-3, at which eps counts, to 1e3."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (6 * torch.rand(rows, 1, generator=generator) - 3)
    tensors = [torch.randn(rows, D, generator=generator) * sizes for _ in range(count)]
    weight = 1 + 0.3 * torch.randn(D, generator=generator)
    grads = [torch.randn(rows, D, generator=generator).to(DEVICE) for _ in range(2)]
    return [tensor.to(DEVICE, dtype) for tensor in tensors], weight.to(DEVICE, dtype), grads


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 7, TILE // 64 + 1]),
    D=st.sampled_from([5, 20, 64, 96, 256]),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
)
def test_values_and_gradients(rows, D, kind, dtype, seed):
    (x,), weight, grads = problem(rows, D, dtype, seed)
    check(lambda x, weight, impl: (rms_norm(x, weight, kind, impl=impl),), [x, weight], grads[:1])


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 40]),
    D=st.sampled_from([5, 20, 96]),
    kind=st.sampled_from(KINDS),
    stream=st.sampled_from([torch.float32, None]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
)
def test_with_the_stream(rows, D, kind, stream, dtype, seed):
    (x, branch), weight, grads = problem(rows, D, dtype, seed, count=2)
    x = x.to(stream or dtype)
    check(
        lambda *t, impl: add_and_norm(t[0], t[1], t[2], kind, impl=impl), [x, branch, weight], grads
    )
    check(lambda *t, impl: add_and_norm(t[0], None, t[1], kind, impl=impl), [x, weight], grads)
    check(
        lambda *t, impl: (norm_and_add(t[0], t[1], t[2], kind, impl=impl),),
        [branch, x, weight],
        grads[:1],
    )


@pytest.mark.parametrize("D", [640, 2304, 4096, 8192])
def test_rows_of_models(D):
    (x, branch), weight, grads = problem(3, D, torch.bfloat16, count=2)
    check(
        lambda *t, impl: add_and_norm(t[0], t[1], t[2], LLAMA, impl=impl),
        [x.float(), branch, weight],
        grads,
    )


def test_more_rows_than_programs_sum_the_gradient_of_a_weight():
    (x,), weight, grads = problem(PROGRAMS + 5, TILE)
    check(lambda x, weight, impl: (rms_norm(x, weight, LLAMA, impl=impl),), [x, weight], grads[:1])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)])
def test_heads_in_any_order_of_memory_are_read_where_they_lie(order):
    x = torch.randn(1, 5, 3, 16, device=DEVICE)
    heads = x.permute(order)
    weight, grad = (
        torch.randn(heads.shape[-1], device=DEVICE),
        torch.randn(heads.shape, device=DEVICE),
    )
    rows_lie_together = order[-1] == 3
    assert rows_lie_together == (
        rms_norm(heads, weight, GEMMA, impl="triton").stride() == heads.stride()
    )
    check(
        lambda x, weight, impl: (rms_norm(x.permute(order), weight, GEMMA, impl=impl),),
        [x, weight],
        [grad],
    )


@pytest.mark.parametrize(
    "heads_of",
    [
        lambda both: both[..., :48].unflatten(-1, (3, 16)),
        lambda both: both[..., 48:].unflatten(-1, (3, 16)).transpose(1, 2),
        lambda both: both[:, ::2, 16:].unflatten(-1, (-1, 16)),
        lambda both: both[:, :, :16],
    ],
    ids=["queries", "keys, heads first", "every second token", "one head"],
)
def test_heads_of_one_product_are_read_where_they_lie(heads_of, monkeypatch):
    both = torch.randn(1, 6, 2 * 48, device=DEVICE)
    heads = heads_of(both)
    weight, grad = torch.randn(16, device=DEVICE), torch.randn(heads.shape, device=DEVICE)
    with counted_traffic(monkeypatch) as traffic, counted_launches(monkeypatch) as launches:
        result = rms_norm(heads, weight, GEMMA, impl="triton")
    assert launches.total() == 1
    assert traffic.memory <= 2 * result.nbytes + 6 * weight.nbytes
    check(
        lambda x, weight, impl: (rms_norm(heads_of(x), weight, GEMMA, impl=impl),),
        [both, weight],
        [grad],
    )


@pytest.mark.parametrize("used", [(True, False), (False, True)])
def test_a_gradient_of_one_result_alone(used):
    (x, branch), weight, grads = problem(4, 16, torch.bfloat16, count=2)
    found = []
    for impl in ("eager", "triton"):
        leaves = [t.clone().requires_grad_() for t in (x.float(), branch, weight)]
        results = add_and_norm(*leaves, GEMMA, impl=impl)
        loss = sum(
            (r * g).sum() for r, g, counts in zip(results, grads, used, strict=True) if counts
        )
        found.append(torch.autograd.grad(loss, leaves, allow_unused=True))
    for eager, triton in zip(*found, strict=True):
        assert (eager is None) == (triton is None)
        if eager is not None:
            torch.testing.assert_close(triton, eager, rtol=2e-2, atol=1e-3)


def test_launches_and_bytes(monkeypatch):
    """Each tensor is read or written once; a frozen weight has no sum."""
    (x, branch), weight, grads = problem(64, 256, torch.bfloat16, count=2)
    stream, N = x.float().requires_grad_(), x.numel()
    branch.requires_grad_()
    for trains in (False, True):
        weight.requires_grad_(trains)
        with counted_traffic(monkeypatch) as traffic, counted_launches(monkeypatch) as launches:
            total, normed = add_and_norm(stream, branch, weight, LLAMA, impl="triton")
        assert launches.total() == 1
        assert traffic.memory == (4 + 2 + 4 + 2) * N + weight.nbytes
        with counted_traffic(monkeypatch) as traffic, counted_launches(monkeypatch) as launches:
            torch.autograd.backward([total, normed], [grads[0], grads[1].bfloat16()])
        assert launches.total() == 1 + trains
        assert trains or traffic.memory == (2 + 4 + 4 + 4 + 2) * N + weight.nbytes


def test_no_rows():
    x, weight = torch.ones(0, 8, device=DEVICE, requires_grad=True), torch.ones(8, device=DEVICE)
    assert rms_norm(x, weight, LLAMA, impl="triton").shape == (0, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 8), torch.ones(4)), r"weight must have shape \[8\], got \[4\]"),
        (
            (torch.ones(2, 8), torch.ones(8, dtype=torch.int64)),
            "weight must be of a floating dtype",
        ),
        ((torch.ones(2, 8, dtype=torch.int32), torch.ones(8)), "x must be of a floating dtype"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(*arguments, LLAMA)


def test_a_branch_of_another_shape():
    with pytest.raises(ValueError, match="branch must have the shape of stream"):
        add_and_norm(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), LLAMA)
    with pytest.raises(ValueError, match="stream must have the shape of branch"):
        norm_and_add(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), LLAMA)
