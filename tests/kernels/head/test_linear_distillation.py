"""Divergences of a student's from a teacher's distribution: against their formulas, of whole
logits.
"""

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import kl_div

from benchmarks.peak_memory import PeakMemory
from fastp3o_kernels import linear_distillation, onednn
from fastp3o_kernels.head import eager as head_eager
from fastp3o_kernels.rows.eager import ROWS_AT_ONCE
from tests.kernels.problems import (
    ARITHMETICS,
    DEVICE,
    HALVES,
    budget_for,
    multiplied_as,
    random_hidden_states,
)


def kl(a, b):
    return kl_div(b, a, reduction="none", log_target=True).sum(1)


def formula(student, teacher, divergence, beta, kept=slice(None)):
    logits = [
        head_eager.products(x.hidden, x.head, x.hidden.dtype)[:, kept] for x in (student, teacher)
    ]
    if student.softcap is not None:
        logits[0] = student.softcap * (logits[0] / student.softcap).tanh()
    s, t = (
        (logits[0] / student.temperature).log_softmax(1),
        (logits[1] / teacher.temperature).log_softmax(1),
    )
    m = torch.stack([t + math.log(beta), s + math.log(1 - beta)]).logsumexp(0)
    return {
        "reverse_kl": kl(s, t),
        "forward_kl": kl(t, s),
        "jsd": beta * kl(t, m) + (1 - beta) * kl(s, m),
    }[divergence]


def distillation(student, teacher, divergence, beta, **given):
    given |= {"divergence": divergence, "beta": beta}
    return linear_distillation(student.hidden, student.head, teacher.hidden, teacher.head, **given)


def run(function, student, teacher, *kind, **given):
    student = student.leaves()
    values = function(student, teacher, *kind, **given)
    # one token has no weight
    (values * (torch.arange(len(values), device=DEVICE) - 1.0)).sum().backward()
    return values.detach(), student.gradients()


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 90), st.integers(3, 90)),
    held=st.integers(1, 100),
    kind=st.tuples(
        st.sampled_from(["reverse_kl", "forward_kl", "jsd"]), st.sampled_from([0.5, 0.1, 0.99])
    ),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32, *HALVES]),
    arithmetic=st.sampled_from(ARITHMETICS),
    scale=st.sampled_from([0.01, 2.0, 40.0]),
    bias=st.booleans(),
    excluded=st.sampled_from([None, -math.inf, -1e30]),
    softcap=st.sampled_from([None, 5.0]),
    temperature=st.sampled_from([1.0, 0.7]),
    seed=st.integers(0, 10**6),
)
def test_it_is_the_formula(
    sizes, held, kind, dtype, arithmetic, scale, bias, excluded, softcap, temperature, seed
):
    """In fp64; otherwise as exact as eager. excluded: the bias of a token that neither has; the
    formula skips it.
    """
    scale = scale / 4 if dtype == torch.float16 else scale  # whose products end at 65504
    given = {"scale": scale, "bias": bias or excluded is not None, "temperature": temperature}
    student = random_hidden_states(
        *sizes, 8, DEVICE, dtype, seed=seed, softcap=None if excluded else softcap, **given
    )
    teacher = random_hidden_states(*sizes, 5, DEVICE, dtype, seed=seed + 1, **given)
    for states in (student, teacher) if excluded else ():
        states.bias[0] = excluded
    kept = slice(1 if excluded else 0, None)
    values, targets = run(
        formula, student.to(torch.float64), teacher.to(torch.float64), *kind, kept=kept
    )
    with multiplied_as(arithmetic, dtype):
        eager, eager_gradients = run(formula, student, teacher, *kind, kept=kept)
        got, gradients = run(
            distillation, student, teacher, *kind, memory_budget=3 * budget_for(held, sizes[1])
        )
    size = 1e-10 if dtype == torch.float64 else 1e-5
    share = max(10 * size, (arithmetic != "widened") * torch.finfo(dtype).eps)
    assert (got - values).abs().max() <= 2 * (eager - values).abs().max() + size * (
        1 + values.abs().max()
    )
    for gradient, by_eager, target in zip(gradients, eager_gradients, targets, strict=True):
        assert (gradient - target).norm() <= 2 * (by_eager - target).norm().nan_to_num() + share * (
            0.1 + target.norm()
        )


def test_memory_stays_within_the_budget():
    N, V, D, budget = 2000, 1000, 8, budget_for(600, 1000)
    student, teacher = (
        random_hidden_states(N, V, D, DEVICE, seed=seed).leaves() for seed in (0, 1)
    )
    with PeakMemory() as memory:
        distillation(student, teacher, "jsd", 0.5, memory_budget=budget).sum().backward()
    assert teacher.gradients() == [None, None]
    # With gradients, vectors, temporaries and a part of a product.
    most = budget + 4 * (2 * N * D + V * D + 12 * N + 7 * ROWS_AT_ONCE * V + onednn.PART)
    assert memory.peak <= most < 0.4 * 12 * N * V


def test_what_is_wrong_is_named_and_a_teacher_that_changes_is_refused():
    student, teacher = (random_hidden_states(5, 30, 8, DEVICE).leaves() for _ in range(2))
    for wrong, divergence, message in (
        (
            replace(teacher, hidden=teacher.hidden[1:]),
            "jsd",
            "must share the tokens: [4, 8], [5, 8]",
        ),
        (replace(teacher, weight=teacher.weight[1:]), "jsd", "must share the vocabulary: [29, 8]"),
        (
            replace(teacher, weight=teacher.weight[:, 1:]),
            "jsd",
            "the teacher's hidden [N, D] and weight [V, D] must",
        ),
        (
            teacher,
            "kl",
            "one of reverse_kl, forward_kl, jsd, and beta above 0 and below 1, got 'kl'",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            distillation(student, wrong, divergence, 0.5)
    values = distillation(student, teacher, "jsd", 0.5)
    teacher.weight.detach().mul_(2)
    with pytest.raises(
        RuntimeError, match="teacher's tensors were modified by an inplace operation"
    ):
        values.sum().backward()
