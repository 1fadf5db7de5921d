import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastp3o_kernels import logits_p3o_loss, sequence_logprobs, token_logprobs
from fastp3o_kernels.operation import INTERPRET
from fastp3o_kernels.rows import logits_kernel
from fastp3o_kernels.rows.rows import Rows
from tests.kernels.problems import DEVICE, EXAMPLES, vocabularies


def run(logits, labels, weights, impl, **settings):
    logits = logits.detach().requires_grad_()
    logprobs = token_logprobs(logits, labels, impl=impl, **settings)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), logits.grad


def check(logits, labels, **settings):
    """Triton's error against fp64 is bounded by eager's own in the same dtype, in values and
    gradients.
    """
    weights = torch.randn(len(logits), device=logits.device)
    expected, expected_grad = run(logits.double(), labels, weights.double(), "eager", **settings)
    eager, eager_grad = run(logits, labels, weights, "eager", **settings)
    triton, triton_grad = run(logits, labels, weights, "triton", **settings)
    assert triton.dtype == torch.float32
    assert triton_grad.dtype == logits.dtype
    finite = expected.isfinite()
    assert torch.equal(triton.isfinite(), finite)
    assert (triton <= 0).all()

    def error(values, target):
        return (values.double() - target).abs().max().item() if target.numel() else 0.0

    # A few roundings of fp32 at the size of the scaled logits, as 1 / temperature is rounded too.
    size = logits[logits.isfinite()].abs().max().item() / settings.get("temperature", 1.0)
    rounding = 4 * torch.finfo(torch.float32).eps * max(size, 1.0)
    assert (
        error(triton[finite], expected[finite])
        <= 2 * error(eager[finite], expected[finite]) + rounding
    )
    # The interpreter cuts off where hardware rounds to 16 bits.
    interpreted = torch.finfo(logits.dtype).eps if INTERPRET else 0.0
    floor = (interpreted + rounding) * expected_grad.abs().max().item() + 1e-6
    assert error(triton_grad, expected_grad) <= 2 * error(eager_grad, expected_grad) + floor
    return triton, triton_grad


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(
    N=st.integers(1, 9),
    V=vocabularies(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([0.1, 3.0, 100.0]),
    temperature=st.sampled_from([1.0, 0.7, 3.0]),
    seed=st.integers(0, 10**6),
)
def test_random_shapes_and_dtypes(N, V, dtype, scale, temperature, seed):
    torch.manual_seed(seed)
    logits = (scale * torch.randn(N, V, device=DEVICE)).to(dtype)
    check(logits, torch.randint(V, (N,), device=DEVICE), temperature=temperature)


@pytest.mark.parametrize("V", [2, 4096, 4097, 8200])
def test_vocabularies_around_the_block(V):
    """A tail that is not masked out shows as log-probs above 0 (verl #2656, #2899)."""
    logits = (5 * torch.randn(3, 8208, device=DEVICE) - 50)[:, :V]
    for rows in (logits, logits.contiguous()):
        check(rows, torch.tensor([0, V - 1, V // 2], device=DEVICE))


def test_maxima_far_apart_between_blocks():
    logits = torch.randn(3, 9008, device=DEVICE)
    logits[0, :4096] -= 1e4
    logits[1, 4096:8192] += 300
    logits[2, 8192:] += 1e5
    check(logits, torch.tensor([10, 5000, 8999], device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_masked_by_the_lowest_number(dtype):
    """A finite mask: rows of it keep a distribution, and no product that overflows makes a NaN."""
    lowest = torch.finfo(dtype).min
    logits = torch.randn(3, 9008, device=DEVICE).to(dtype)
    logits[0, 10:] = lowest
    logits[1] = lowest
    logits[2, :4096] = lowest
    labels, ones = torch.tensor([3, 5, 8999], device=DEVICE), torch.ones(3, device=DEVICE)
    logprobs, gradient = run(logits, labels, ones, "triton")
    expected = logits.double().log_softmax(1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=0)
    assert gradient.isfinite().all()
    assert not gradient[0, 10:].any()
    assert not gradient[2, :4096].any()


def test_minus_infinity_anywhere():
    """flash-attn #1930, TRL #7221: no NaN from a block, or a label, that is -inf."""
    logits = torch.randn(4, 9008, device=DEVICE)
    logits[0, :4096] = -float("inf")
    logits[1, 4096:] = -float("inf")
    logits[2, ::2] = -float("inf")
    logits[3, :8999] = -float("inf")
    _, gradient = check(logits, torch.tensor([4096, 1, 1, 8999], device=DEVICE))
    assert (gradient[logits.isinf()] == 0).all()
    impossible = token_logprobs(logits[:1], torch.tensor([0], device=DEVICE), impl="triton")
    assert impossible.item() == -float("inf")


def test_layouts_and_labels_of_other_types_and_alignments():
    """Unaligned int64 labels broke Liger (#1304)."""
    torch.manual_seed(0)
    whole = torch.randn(12, 45, device=DEVICE)
    for logits in (whole[::2], whole[:, 3:40], whole.T, whole[:, ::3], whole[:1].expand(5, -1)):
        labels = torch.randint(logits.shape[1], (len(logits) + 1,), device=DEVICE)[1:]
        assert torch.equal(check(logits, labels)[0], check(logits, labels.int())[0])


def test_in_place_backward_gives_the_same_and_stays_inside_a_slice():
    whole = torch.randn(6, 4200, device=DEVICE)
    labels = torch.randint(10, (6,), device=DEVICE)
    _, expected = run(whole[:, 5:4105], labels, torch.ones(6, device=DEVICE), "triton")
    base = whole.clone().requires_grad_()
    storage = base * 1.0
    part = storage[:, 5:4105]
    part.retain_grad()
    logprobs = token_logprobs(part, labels, inplace_backward=True, impl="triton")
    logprobs.sum().backward(retain_graph=True)
    assert torch.equal(part.grad, expected)
    assert torch.equal(storage[:, :5], whole[:, :5])
    assert torch.equal(storage[:, 4105:], whole[:, 4105:])
    with pytest.raises(RuntimeError):
        logprobs.sum().backward()


@pytest.mark.skipif(not INTERPRET, reason="the interpreter's grid is what is tested")
def test_rows_are_in_the_grids_first_dimension(monkeypatch):
    """Only that one may exceed 65535."""
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(logits_kernel, "logprobs_kernel", Recorder())
    labels = torch.zeros(70000, dtype=torch.long)
    logits_kernel.launch_logprobs(Rows(torch.zeros(70000, 2), labels))
    assert grids == [(70000,)]


class Large(TorchDispatchMode):
    """Counts the new tensors of at least this many elements."""

    def __init__(self, elements: int):
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves(args)
            if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.numel() >= self.elements:
                self.count += leaf.untyped_storage().data_ptr() not in before
        return result


@pytest.mark.parametrize("ignored", [None, "finite", "all -inf"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_eager_copies_no_logits_that_pytorch_would_not(temperature, ignored):
    """Neither statistics that nobody asked for nor ignored rows cost a pass over all logits."""
    N, V = 6, 50
    logits, labels = torch.randn(N, V), torch.randint(V, (N,))
    if ignored:
        labels[2] = -100
    if ignored == "all -inf":
        logits[2] = -torch.inf
    leaf = logits.clone().requires_grad_()
    with Large(N * V) as plain:
        scaled = leaf if temperature == 1 else leaf / temperature
        scaled.log_softmax(1).gather(1, labels.clamp(min=0)[:, None]).sum().backward()
    leaf.grad = None
    with Large(N * V) as ours:
        token_logprobs(leaf, labels, temperature=temperature, impl="eager").sum().backward()
    assert leaf.grad.isfinite().all()
    masked = 2 * (ignored == "all -inf")  # forward and backward
    assert ours.count == plain.count + masked
    with Large(N * V) as of_the_loss:
        logits_p3o_loss(
            leaf,
            labels.clamp(min=0),
            [0, 3, 6],
            None,
            torch.zeros(1, 2),
            torch.tensor([[0.0, 1.0]]),
        )
    assert of_the_loss.count == 1


@pytest.mark.gpu
def test_more_rows_than_65535_and_offsets_beyond_2_to_the_31():
    check(torch.randn(70001, 3, device=DEVICE), torch.randint(3, (70001,), device=DEVICE))
    rows, V = 17000, 131072
    logits = torch.empty(rows, V, dtype=torch.bfloat16, device=DEVICE).normal_()
    labels = torch.randint(V, (rows,), device=DEVICE)
    last = logits[-3:].clone()
    (got,) = torch.autograd.grad(
        token_logprobs(logits.requires_grad_(), labels, impl="triton").sum(), logits
    )
    _, expected = run(
        last.double(), labels[-3:], torch.ones(3, dtype=torch.float64, device=DEVICE), "eager"
    )
    torch.testing.assert_close(got[-3:].double(), expected, atol=1e-6, rtol=1e-2)


def test_sequence_logprobs_are_sums_and_differentiable(impl):
    values = torch.randn(10, device=DEVICE, requires_grad=True)
    offsets = torch.tensor([0, 1, 7, 7, 10], dtype=torch.int32, device=DEVICE)
    sums = sequence_logprobs(values, offsets, impl=impl)
    torch.testing.assert_close(
        sums, torch.stack([values[begin:end].sum() for begin, end in offsets.unfold(0, 2, 1)])
    )
    (sums * torch.tensor([1.0, 2.0, 9.0, 3.0], device=DEVICE)).sum().backward()
    assert values.grad.tolist() == [1.0] + [2.0] * 6 + [3.0] * 3
    for others in (offsets.tolist(), offsets.cpu().long()):
        assert torch.equal(sequence_logprobs(values, others, impl=impl), sums)
    assert sequence_logprobs(values[:0], [0, 0, 0], impl=impl).tolist() == [0.0, 0.0]
