"""Exponentials that are written as logits are read, and the gradients that come of them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastp3o_kernels import Head, linear_logprobs
from fastp3o_kernels.head.chunks import plan_chunks
from fastp3o_kernels.head.head import HeadDtypes
from fastp3o_kernels.operation import INTERPRET
from fastp3o_kernels.rows.exponentials_kernel import launch_exponentials
from fastp3o_kernels.rows.rows import LogitsTransform, Rows, transformed
from tests.kernels.interpreted import counted_traffic
from tests.kernels.problems import DEVICE, multiplied_as, random_hidden_states, relative_error
from tests.pairwise import pairwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Logits by how the label was drawn, and how far they are apart.
CASES = [
    "sampled",
    "any label",
    "the least likely",
    "of little probability",
    "certain",
    "flat",
    "masked",
]


def rows_of(case: str, n: int, V: int, transform: LogitsTransform) -> Rows:
    torch.manual_seed(0)
    scale = {
        "the least likely": 40.0,
        "of little probability": 8.0,
        "certain": 100.0,
        "flat": 0.0,
    }.get(case, 2.0)
    logits = scale * torch.randn(n, V)
    if case == "masked":
        logits[:, ::3] = -torch.inf
    distribution = transformed(logits.double(), transform).softmax(1)
    labels = torch.multinomial(distribution, 1).squeeze(1)
    if case == "any label":
        labels = torch.randint(V, (n,))
    elif "least" in case or "little" in case:
        labels = distribution.argmin(1)
    return Rows(logits.to(DEVICE), labels.to(DEVICE), transform)


SHAPES = [(1, 5), (3, 4096), (4, 9001)]


@pytest.mark.parametrize(
    ("case", "dtype", "softcap", "shape"), pairwise(CASES, DTYPES, [None, 9.0], SHAPES)
)
def test_exponentials_are_the_gradient_but_for_a_factor_of_each_row(case, dtype, softcap, shape):
    n, V = shape
    rows = rows_of(case, n, V, LogitsTransform(softcap=softcap, temperature=0.9))
    out = torch.full((n, V), torch.nan, dtype=dtype, device=DEVICE)
    logprobs, sums = launch_exponentials(rows, out, writes=True)
    products = rows.logits.double().requires_grad_()
    logits = products if softcap is None else softcap * (products / softcap).tanh()
    expected = (logits / 0.9).log_softmax(1).gather(1, rows.labels[:, None]).squeeze(1)
    (gradient,) = torch.autograd.grad(expected.sum(), products)
    torch.testing.assert_close(logprobs.double(), expected.detach(), rtol=3e-6, atol=2e-6)
    assert (logprobs <= 0).all()
    assert (out.abs() < 2.0**16).all() or dtype != torch.float16
    found = out.double() / (-0.9 * sums.double()).unsqueeze(1)
    # The interpreter cuts off where hardware rounds.
    bound = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps * (1 if INTERPRET else 0.5)
    for got, target in zip(found, gradient, strict=True):
        assert (got - target).norm() <= bound * target.norm() + 1e-7


def test_ignored_rows_and_those_of_no_finite_number_are_zeros():
    logits = torch.randn(6, 300, device=DEVICE)
    logits[1], logits[2, 7], logits[3, 9], logits[4] = -torch.inf, torch.inf, torch.nan, torch.inf
    labels = torch.tensor([-100, 3, 3, 3, 3, 400], device=DEVICE)
    out = torch.full((6, 300), torch.nan, dtype=torch.float16, device=DEVICE)
    logprobs, sums = launch_exponentials(Rows(logits, labels, ignore_index=-100), out, writes=True)
    assert (logprobs[0], sums[0]) == (0, 1)
    assert not out[:5].any()
    assert sums[1:5].isnan().all()
    assert logprobs[1:].isnan().all()  # the last has a label outside of the vocabulary
    assert out.isfinite().all()


@pytest.mark.parametrize("case", ["sampled", "the least likely"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probs_have_the_same_bits_whether_exponentials_are_written_or_not(case, dtype):
    rows = rows_of(case, 4, 5001, LogitsTransform())
    out = torch.zeros(4, 5001, dtype=dtype, device=DEVICE)
    without, _ = launch_exponentials(rows, out[:1, :1], writes=False)
    assert not out.any()
    assert torch.equal(without, launch_exponentials(rows, out, writes=True)[0])


@pytest.mark.skipif(not INTERPRET, reason="bytes are counted in the interpreter")
@pytest.mark.parametrize(("case", "reads"), [("sampled", 1), ("the least likely", 3)])
def test_logits_are_read_once_and_again_only_where_the_label_is_absurd(case, reads, monkeypatch):
    rows = rows_of(case, 4, 20_000, LogitsTransform())
    out = torch.empty(4, 20_000, dtype=torch.bfloat16)
    if case == "sampled":
        rows = rows._replace(labels=rows.logits.argmax(1))
    else:
        rows.logits.mul_(4)
    with counted_traffic(monkeypatch) as traffic:
        launch_exponentials(rows, out, writes=True)
    assert traffic.loaded == pytest.approx(reads * rows.logits.nbytes, rel=0.01)
    assert traffic.stored == pytest.approx(out.nbytes * (1 if reads == 1 else 2), rel=0.01)


def run(states, labels, weights, impl, **given):
    states = states.leaves()
    logprobs = linear_logprobs(states.hidden, states.head, labels, impl=impl, **given)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), states.gradients()


def batch(dtype, N=90, V=500, scale=2.0, **options):
    states = random_hidden_states(N, V, 32, DEVICE, dtype, scale=scale, **options)
    labels = torch.multinomial(states.to(torch.float64).logits().softmax(1), 1).squeeze(1)
    labels[::11] = -100
    weights = torch.randn(N, device=DEVICE)
    weights[5:20] = 0
    return states, labels, weights


@pytest.mark.parametrize(
    ("dtype", "scale", "softcap", "rows"),
    pairwise(DTYPES, [0.05, 2.0, 12.0], [None, 8.0], [200, 40]),
)
def test_gradients_are_those_of_fp64_within_the_rounding_of_operands(dtype, scale, softcap, rows):
    states, labels, weights = batch(dtype, scale=scale, softcap=softcap, temperature=0.7)
    logprobs, targets = run(states.to(torch.float64), labels, weights.double(), "eager")
    budget = rows * 512 * (4 + dtype.itemsize)
    with multiplied_as("gpu", dtype):
        found, gradients = run(states, labels, weights, "triton", memory_budget=budget)
        again, repeated = run(states, labels, weights, "triton", memory_budget=budget)
    assert (found - logprobs).abs().max() < 3e-5
    bound = 2e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    assert [gradient.dtype for gradient in gradients] == [dtype, dtype]
    assert max(map(relative_error, gradients, targets)) < bound
    assert torch.equal(found, again)
    assert all(map(torch.equal, gradients, repeated))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_log_probs_of_a_response_of_128_tokens_are_those_of_its_rounded_operands(dtype):
    states, labels, _ = batch(dtype, 128, 2000)
    labels = labels.clamp(min=0)
    expected = linear_logprobs(
        states.to(torch.float64).hidden, states.to(torch.float64).head, labels, impl="eager"
    )
    with multiplied_as("gpu", dtype):
        found = linear_logprobs(states.hidden, states.head, labels, impl="triton")
    assert abs(found.double().sum() - expected.sum()) < 1e-4


@pytest.mark.parametrize(("rows", "again"), [(300, 0), (200, 130), (70, 300 - 70)])
def test_logits_are_computed_again_only_where_memory_does_not_keep_their_exponentials(rows, again):
    N, D, V = 300, 32, 512
    states, labels, weights = batch(torch.bfloat16, N, V)
    dtypes = HeadDtypes(*[torch.bfloat16] * 3, torch.float32)
    plan = plan_chunks([0, N], V, dtypes, V * 2 * rows + V * 4 * 32, triton=True, one_pass=True)
    kept = plan.chunks[-1].spans[-1]
    with multiplied_as("gpu", torch.bfloat16), FlopCounterMode(display=False) as counter:
        run(states, labels, weights, "triton", memory_budget=V * 2 * rows + V * 4 * 32)
    assert counter.get_total_flops() == 2 * (3 * N + kept.start) * D * V
    assert kept.start <= again
    assert (
        plan.row_elements * (4 * plan.logits_rows + 2 * plan.dlogits_rows)
        <= V * 2 * rows + V * 4 * 32
    )


def test_a_row_without_a_coefficient_may_hold_what_is_not_finite():
    states, labels, weights = batch(torch.float32)
    weights[5], states.weight[7] = 0.0, states.weight[7].abs()
    states.hidden[5] = 3e38
    _, gradients = run(states, labels, weights, "triton")
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [None, ("entropy",)])
def test_heads_with_a_bias_and_entropies_keep_two_passes(bias, outputs):
    states, labels, _ = batch(torch.float32, bias=bias)
    head = Head(states.weight, bias=states.bias)
    expected = linear_logprobs(states.hidden, head, labels, outputs=outputs, impl="eager")
    found = linear_logprobs(states.hidden, head, labels, outputs=outputs, impl="triton")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
