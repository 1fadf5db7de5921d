"""Losses against the paper's formulas in fp64, and kernels and chunks against eager PyTorch: values
and gradients.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o_kernels.operation import INTERPRET
from tests.kernels import problems
from tests.kernels.levels import Batch

HEAD = {"bias": True, "softcap": 6.0, "temperature": 1.3}
KNOWN = {
    "groups": problems.ragged_groups(),
    "clipping": st.sampled_from(problems.CLIPPINGS),
    "kl_reward": st.sampled_from(["current", "rollout"]),
    "held": st.integers(1, 60),
    "masked": st.booleans(),
    "apart": st.sampled_from([None, 0.5, 30.0]),
    "seed": st.integers(0, 10**6),
}


@pytest.mark.parametrize("level", ["logits", "hidden"])
@settings(max_examples=20, deadline=None)
@given(
    V=st.integers(2, 40), impl=st.sampled_from(["eager", None]), known=st.fixed_dictionaries(KNOWN)
)
def test_it_is_the_paper_in_fp64(level, V, impl, known):
    (K, lengths), held = known.pop("groups"), known.pop("held")
    batch = Batch(level, lengths, V, K=K, **known, **HEAD).to(torch.float64)
    output, gradients = batch.run(impl, memory_budget=2 * problems.budget_for(held, V))
    leaves = batch.leaves()
    logits = leaves[0] if level == "logits" else batch.policy(leaves).logits()
    expected = problems.oracle(batch.pairs, logits, known["clipping"], known["kl_reward"])
    torch.testing.assert_close(output.loss, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        gradients, list(torch.autograd.grad(expected, leaves)), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("level", ["logits", "hidden", "objective", "log-probs"])
@settings(max_examples=problems.EXAMPLES, deadline=None)
@given(
    V=problems.vocabularies(2, 90),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    impl=st.sampled_from(problems.CHUNKED),
    arithmetic=st.sampled_from(problems.ARITHMETICS),
    known=st.fixed_dictionaries(
        KNOWN
        | {
            "bias": st.booleans(),
            "softcap": st.sampled_from([None, 5.0]),
            "temperature": st.sampled_from([1.0, 0.7]),
        }
    ),
)
def test_kernels_and_chunks_are_as_exact_as_eager(level, V, dtype, impl, arithmetic, known):
    (K, lengths), budget = known.pop("groups"), problems.budget_for(known.pop("held"), V)
    batch = Batch(level, lengths, V, K=K, dtype=dtype, **known)
    if level == "log-probs":
        batch.pairs.labels[::7] = -100
    expected, targets = batch.to(torch.float64).run("eager")
    with problems.multiplied_as(arithmetic, dtype):
        eager, eager_gradients = batch.run("eager")
        output, gradients = batch.run("triton" if level == "logits" else impl, memory_budget=budget)
    size = 1e-5 * (1 + sum(lengths))
    assert abs(output.loss - expected.loss) <= 4 * abs(eager.loss - expected.loss) + size * (
        1 + abs(expected.loss)
    )
    # The interpreter cuts off where hardware rounds to 16 bits.
    share = 1e-4 + (torch.finfo(dtype).eps if INTERPRET and level == "logits" else 0.0)
    # Of few tokens one rounding decides, in which eager may be lucky.
    share += torch.finfo(dtype).eps / 2 / math.sqrt(max(1, sum(lengths)))
    for got, by_eager, target in zip(gradients, eager_gradients, targets, strict=True):
        assert got.dtype == dtype
        assert (got - target).norm() <= 2 * (
            by_eager - target
        ).norm() + share * target.norm() + size
    torch.testing.assert_close(output.metrics, eager.metrics, rtol=1e-4, atol=1e-4)
    assert output.counts == eager.counts
