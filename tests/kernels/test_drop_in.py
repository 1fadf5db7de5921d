"""Uses of the losses in other trainers: what holds for each loss, whatever it takes."""

from itertools import accumulate

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.peak_memory import PeakMemory
from fastp3o_kernels import checks
from fastp3o_kernels.rows.eager import ROWS_AT_ONCE
from tests.kernels.levels import FUSED, IMPLEMENTATIONS, LENGTHS, P3O_LEVELS, Batch
from tests.kernels.problems import CHUNKED, DEVICE, budget_for, relative_error
from tests.pairwise import pairwise

LEVELS = [*P3O_LEVELS, "objective", "log-probs"]
N, V, D = sum(LENGTHS), 50, 8
# Two responses to each prompt are computed together, where the budget holds them.
GROUPS = [first + second for first, second in zip(LENGTHS[::2], LENGTHS[1::2], strict=True)]
BOUNDS = [0, *accumulate(LENGTHS)]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0.5, *BOUNDS[1:]], "cu_seqlens must be int32 or int64, got torch.float32"),
        ([], r"shape \[S \+ 1\], got \[0\]"),
        (BOUNDS[:-1], "with 2 responses to each prompt their number must be a multiple"),
        ([*BOUNDS[:-1], 51], r"end with the number of tokens \(52\), got 0 and 51"),
        ([1, *BOUNDS[1:]], r"must begin with 0 .*, got 1 and 52"),
        ([0, 3, 60, *BOUNDS[3:]], r"cu_seqlens\[4\] = 18 must not be below cu_seqlens\[2\] = 60"),
    ],
)
@pytest.mark.parametrize("level", FUSED)
def test_wrong_offsets_are_named_on_a_gpu_too(level, offsets, message, monkeypatch):
    """Tokens that no chunk covers would have uninitialized memory."""
    monkeypatch.setattr(checks, "may_look_at_values", lambda tensor: False)
    with pytest.raises(ValueError, match=message):
        Batch(level).run(offsets=offsets)


@pytest.mark.parametrize(("level", "impl"), pairwise(LEVELS, IMPLEMENTATIONS))
def test_the_incoming_gradient_scales(level, impl):
    batch = Batch(level, bias=True)
    expected = [-2.0 * gradient for gradient in batch.run(impl)[1]]
    # A power of two rounds nothing, on any machine.
    torch.testing.assert_close(batch.run(impl, incoming=-2.0)[1], expected, rtol=0, atol=0)


@pytest.mark.parametrize(("level", "impl"), pairwise(LEVELS, IMPLEMENTATIONS))
def test_what_is_known_is_constant_and_no_gradient_is_kept_where_none_is_wanted(level, impl):
    batch = Batch(level, apart=0.3)
    names = ("old_logprobs", "ref_logprobs", "rewards", "sampler_logprobs")
    known = [getattr(batch.pairs, name).requires_grad_() for name in names]
    leaves = batch.leaves()
    output = batch.output(leaves, impl=impl)
    output.loss.backward()
    assert all(leaf.grad.any() for leaf in leaves)
    assert [tensor.grad for tensor in known] == [None] * 4
    assert not any(value.requires_grad for value in output[1].values())
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            alone = batch.output(leaves, impl=impl).loss
        assert not alone.requires_grad
        torch.testing.assert_close(alone, output.loss.detach())


@pytest.mark.parametrize("impl", [None, "triton"])
@pytest.mark.parametrize("level", FUSED)
def test_gradients_of_gradients_are_refused(level, impl):
    """A gradient of the gradient is not zero, as if a penalty did not depend on the weights."""
    batch = Batch(level)
    hidden, weight = batch.leaves()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(
            batch.output([hidden, weight], impl=impl).loss, hidden, create_graph=True
        )


@pytest.mark.parametrize("impl", CHUNKED)
@pytest.mark.parametrize("level", FUSED)
def test_a_second_backward_pass_gives_the_same_or_is_refused(level, impl):
    batch = Batch(level)
    leaves = batch.leaves()
    loss = batch.output(leaves, impl=impl, memory_budget=budget_for(32, V)).loss
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    if level == "log-probs":
        assert all(map(torch.equal, torch.autograd.grad(loss, leaves), first))
    else:
        with pytest.raises(
            RuntimeError, match=r"handed out by the first backward pass; call the loss again"
        ):
            loss.backward()


@pytest.mark.parametrize(
    ("level", "impl", "needed", "held"),
    pairwise(
        FUSED,
        CHUNKED,
        [(True, True, 6), (True, False, 4), (False, True, 4), (False, False, 2)],
        [1000, 32, 6],
    ),
)
def test_only_the_products_that_are_needed(level, impl, needed, held):
    """F multiply-adds are 2 F operations. Losses compute gradients with the forward pass, chunk by
    chunk: logits are computed again only of prompts that do not fit. Log-probs compute those of all
    but the last tokens again.
    """
    hidden, weight, products = needed
    batch = Batch(level, clipping="none")
    with FlopCounterMode(display=False) as counter:
        loss = batch.output(
            batch.leaves(hidden, weight), impl=impl, memory_budget=budget_for(held, V)
        ).loss
        forward = counter.get_total_flops()
        if loss.requires_grad:
            loss.backward()
    assert loss.requires_grad == (hidden or weight)
    if (
        impl is None or level == "log-probs"
    ):  # which have no gradients of logits beside the logits in a budget
        held = 2 * held
    again = {1000: 0, 32: N - GROUPS[-1], 6: N - 6, 12: N - 12}.get(held, 0)
    if level != "log-probs":
        again = sum(max(group - held, 0) for group in GROUPS)
        assert forward == counter.get_total_flops()
    assert counter.get_total_flops() == (products * N + 2 * again * loss.requires_grad) * V * D
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        batch.output(batch.leaves(), impl=impl, memory_budget=budget_for(held, V))
    assert counter.get_total_flops() == 2 * N * V * D


@pytest.mark.parametrize("impl", CHUNKED)
@pytest.mark.parametrize(
    ("level", "grad"), [*((level, True) for level in FUSED), ("log-probs", False)]
)
def test_memory_stays_within_the_budget(level, impl, grad):
    lengths, vocabulary = [20, 30, 25, 25] * 4, 1000
    batch, budget = Batch(level, lengths, vocabulary), budget_for(64, vocabulary)
    leaves = batch.leaves(grad, grad)
    with PeakMemory() as memory:
        loss = batch.output(leaves, impl=impl, memory_budget=budget).loss
        if grad:
            loss.backward()
    tokens, statistics = sum(lengths), 9 if level == "objective" else 3
    gradients = 4 * (2 * tokens * D + vocabulary * D)
    vectors_and_temporaries = 4 * 30 * tokens + statistics * 4 * ROWS_AT_ONCE * vocabulary
    assert memory.largest <= budget
    assert (
        memory.peak
        <= budget + grad * gradients + vectors_and_temporaries
        < 0.7 * 8 * tokens * vocabulary
    )


@pytest.mark.parametrize(
    ("level", "impl"), pairwise(["hidden", "objective", "log-probs"], IMPLEMENTATIONS)
)
def test_autocast_gives_fp32_weights_fp32_gradients_and_fp32_logits(level, impl):
    batch = Batch(level)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        output, gradients = batch.run(impl, memory_budget=budget_for(16, V))
    batch.states = batch.states.to(torch.bfloat16).to(torch.float64)
    batch.pairs = batch.pairs.to(torch.float64)
    expected, targets = batch.run("eager")
    assert output.loss.dtype == torch.float32
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 2
    if level == "log-probs":
        torch.testing.assert_close(output.loss.double(), expected.loss, rtol=1e-5, atol=1e-5)
    assert max(map(relative_error, gradients, targets)) < 1e-2
