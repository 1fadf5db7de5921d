"""Divergences of a student's from a teacher's distribution: against their formulas, of whole logits."""

import math
import re
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import kl_div

from benchmarks.peak_memory import PeakMemory
from fastp3o_kernels import linear_distillation
from fastp3o_kernels.head import oracle as head_oracle
from fastp3o_kernels.rows.oracle import ROWS_AT_ONCE
from tests.kernels.problems import (
    DEVICE,
    GPU_ARITHMETIC,
    HALVES,
    as_on_a_gpu,
    budget_for,
    random_hidden_states,
    rounded_gradients_of_logits,
)

DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")


def formula(student, teacher, divergence, beta):
    """Of whole logits, as TRL's GKDTrainer has it."""
    s, t = student.log_softmax(1), teacher.log_softmax(1)
    if divergence == "reverse_kl":
        return kl_div(t, s, reduction="none", log_target=True).sum(1)
    if divergence == "forward_kl":
        return kl_div(s, t, reduction="none", log_target=True).sum(1)
    m = torch.stack([t + math.log(beta), s + math.log(1 - beta)]).logsumexp(0)
    from_teacher, from_student = (kl_div(m, x, reduction="none", log_target=True).sum(1) for x in (t, s))
    return beta * from_teacher + (1 - beta) * from_student


def run(divergences, student, teacher):
    """Divergences, and gradients of their weighted sum. One token has no weight."""
    student, teacher = student.leaves(), teacher.leaves()
    values = divergences(student, teacher)
    (values * (torch.arange(len(values), device=DEVICE) - 1.0)).sum().backward()
    return values.detach(), student.gradients()


def chunked(divergence, beta, **given):
    def divergences(student, teacher):
        kind = {"divergence": divergence, "beta": beta, **given}
        values = linear_distillation(student.hidden, student.head, teacher.hidden, teacher.head, **kind)
        assert torch.autograd.grad(values.sum(), teacher.weight, allow_unused=True, retain_graph=True) == (None,)
        return values

    return divergences


def whole(divergence, beta, kept=slice(None)):
    def logits(states):
        logits = head_oracle.products(states.hidden, states.head, states.hidden.dtype)[:, kept]
        return (
            logits if states.softcap is None else states.softcap * (logits / states.softcap).tanh()
        ) / states.temperature

    return lambda student, teacher: formula(logits(student), logits(teacher), divergence, beta)


PROBLEMS = {
    "N": st.integers(1, 90),
    "V": st.integers(3, 90),
    "held": st.integers(1, 100),
    "kind": st.tuples(st.sampled_from(DIVERGENCES), st.sampled_from([0.5, 0.1, 0.99])),
    "bias": st.booleans(),
    "softcap": st.sampled_from([None, 5.0]),
    "temperature": st.sampled_from([1.0, 0.7]),
    "seed": st.integers(0, 10**6),
}


@settings(max_examples=60, deadline=None)
@given(scale=st.sampled_from([0.01, 2.0, 40.0]), excluded=st.sampled_from([None, -math.inf, -1e30]), **PROBLEMS)
def test_it_is_the_formula_in_fp64(N, V, held, kind, bias, softcap, temperature, seed, scale, excluded):
    """excluded: the logit of a token that neither has, whose column the formula does without."""
    given = {"scale": scale, "bias": bias or excluded is not None, "softcap": None if excluded else softcap}
    student = random_hidden_states(N, V, 8, DEVICE, torch.float64, seed=seed, temperature=temperature, **given)
    teacher = random_hidden_states(N, V, 5, DEVICE, torch.float64, seed=seed + 1, **given)
    for states in (student, teacher) if excluded else ():
        states.bias[0] = excluded
    got = run(chunked(*kind, memory_budget=3 * budget_for(held, V)), student, teacher)
    expected = run(whole(*kind, kept=slice(1 if excluded else 0, None)), student, teacher)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(dtype=st.sampled_from([torch.float32, *HALVES]), gpu=st.sampled_from(GPU_ARITHMETIC), **PROBLEMS)
def test_it_is_as_exact_as_eager(N, V, held, kind, bias, softcap, temperature, seed, dtype, gpu):
    student = random_hidden_states(
        N, V, 8, DEVICE, dtype, seed=seed, bias=bias, softcap=softcap, temperature=temperature
    )
    teacher = random_hidden_states(N, V, 5, DEVICE, dtype, seed=seed + 1)
    values, targets = run(whole(*kind), student.to(torch.float64), teacher.to(torch.float64))
    with rounded_gradients_of_logits(dtype) if gpu else nullcontext():
        eager, eager_gradients = run(whole(*kind), student, teacher)
    with as_on_a_gpu(dtype) if gpu else nullcontext():
        got, gradients = run(chunked(*kind, memory_budget=2 * budget_for(held, V)), student, teacher)
    assert got.dtype == torch.float32
    assert (got - values).abs().max() <= 2 * (eager - values).abs().max() + 1e-5
    for gradient, by_eager, target in zip(gradients, eager_gradients, targets, strict=True):
        assert gradient.dtype == dtype
        assert (gradient - target).norm() <= 2 * (by_eager - target).norm() + 1e-4 * target.norm() + 1e-5 * N


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_memory_stays_within_the_budget(divergence):
    N, V, D = 2000, 1000, 8
    student, teacher = (random_hidden_states(N, V, D, DEVICE, seed=seed).leaves() for seed in (0, 1))
    budget = budget_for(600, V)
    with PeakMemory() as memory:
        chunked(divergence, 0.5, memory_budget=budget)(student, teacher).sum().backward()
    gradients_and_vectors = 4 * (2 * N * D + V * D) + 4 * 12 * N
    assert memory.peak <= budget + gradients_and_vectors + 7 * 4 * ROWS_AT_ONCE * V < 0.4 * 12 * N * V


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"teacher_hidden": torch.zeros(4, 4)}, "must share N, the tokens or the vocabulary, got [5, 8] and [4, 4]"),
        ({"teacher_head": torch.zeros(29, 4)}, "must share V"),
        ({"teacher_head": torch.zeros(30, 3)}, "the teacher's hidden [N, D] and weight [V, D] must share D"),
        ({"divergence": "kl"}, "one of reverse_kl, forward_kl, jsd, got 'kl'"),
        ({"beta": 1.0}, "beta must be above 0 and below 1, got 1.0"),
        ({"memory_budget": 300}, "memory_budget of 300 bytes"),
    ],
)
def test_what_is_wrong_is_named(changed, message):
    student = {"hidden": torch.zeros(5, 8), "head": torch.zeros(30, 8)}
    teacher = {"teacher_hidden": torch.zeros(5, 4), "teacher_head": torch.zeros(30, 4)}
    with pytest.raises(ValueError, match=re.escape(message)):
        linear_distillation(**student | teacher | changed)


def test_a_teacher_that_changes_before_the_backward_pass_is_refused_and_no_tokens_are_taken():
    student, teacher = (random_hidden_states(5, 30, 8, DEVICE).leaves() for _ in range(2))
    values = linear_distillation(student.hidden, student.head, teacher.hidden, teacher.head)
    with torch.no_grad():
        teacher.weight.mul_(2)
    with pytest.raises(RuntimeError, match="teacher's tensors were modified by an inplace operation"):
        values.sum().backward()
    linear_distillation(student.hidden[:0], student.head, teacher.hidden[:0], teacher.head).sum().backward()
    assert student.weight.grad.count_nonzero() == 0
