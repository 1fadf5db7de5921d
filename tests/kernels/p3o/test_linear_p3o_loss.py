import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.kernels.levels import LENGTHS, Batch
from tests.kernels.problems import (
    CHUNKED,
    DEVICE,
    budget_for,
    multiplied_as,
    random_hidden_states,
    relative_error,
)
from tests.pairwise import pairwise

V, D, N = 50, 8, sum(LENGTHS)
LEVELS = ["hidden", "hidden, its own"]


def largest_error(gradients, targets):
    return max(map(relative_error, gradients, targets))


@pytest.mark.parametrize(("impl", "held"), pairwise(CHUNKED, [1000, 32, 6]))
def test_pairs_without_a_coefficient_take_no_part_in_the_gradients_products_of_pytorch(impl, held):
    """With kernels, on a GPU, the host would have to wait for their number: they are rows of zeros."""
    batch = Batch("hidden", clipping="none", kl_coef=0.0)
    batch.pairs.rewards[[0, 2]] = 1.0
    by_pytorch = impl is None and DEVICE.type == "cpu"
    left = N - sum(LENGTHS[0:2] + LENGTHS[4:6]) if by_pytorch else N
    with FlopCounterMode(display=False) as counter:
        output, gradients = batch.run(impl, memory_budget=budget_for(held, V))
    # Without kernels a budget has no gradients of logits beside them, and holds twice as many. With
    # them it holds exponentials of 8 tokens beside 4 rows of logits.
    again = {1000: 0, 32: 0, 6: 32 - 12 if by_pytorch else (11 - 8) + (32 - 8)}[held]
    assert counter.get_total_flops() == (2 * (N + again) + 4 * left) * V * D
    assert output.metrics["zero_gradient_fraction"] == 0.5
    torch.testing.assert_close(gradients, batch.run("eager")[1], rtol=1e-4, atol=1e-6)
    assert (gradients[0][:7] == 0).all()


@pytest.mark.parametrize(
    ("impl", "level", "factors"),
    pairwise(
        CHUNKED,
        LEVELS,
        [(1e-5,), (1.0,), (1e5,), (1e-4, 1e-3, 1e-2, 0.1, 1.0), (0.0, 0.0, 1.0, 1.0, 1.0)],
    ),
)
def test_fp16_gradients_keep_their_digits_whatever_the_size_of_rewards(factors, level, impl):
    """Small enough that probabilities times advantages are nothing in fp16, large enough that these
    are infinite, and rising from chunk to chunk.
    """
    given = {"dtype": torch.float16, "scale": 0.05, "clipping": "none", "kl_coef": 0.0}
    batch = Batch(level, [2, 3] * 10, 3000, **given)
    batch.pairs.rewards *= torch.tensor(factors, device=DEVICE).repeat_interleave(
        10 // len(factors)
    )[:, None]
    _, expected = batch.to(torch.float64).run("eager", incoming=2.0**10 / factors[-1])
    with multiplied_as("gpu", torch.float16):
        _, gradients = batch.run(
            impl, incoming=2.0**10 / factors[-1], memory_budget=budget_for(10, 3000)
        )
    assert largest_error(gradients, expected) < 3e-3


@pytest.mark.gpu
def test_logits_beyond_2_to_the_31_within_one_buffer():
    lengths, vocabulary = [8400, 8500], 131_072
    batch = Batch("hidden", lengths, 64, clipping="none", kl_coef=0.0)
    # Another policy and a small vocabulary, for speed: the ratios are at their cap, the advantage
    # is of the rewards.
    batch.states = random_hidden_states(sum(lengths), vocabulary, D, DEVICE, torch.bfloat16)
    whole, whole_gradients = batch.run(memory_budget=40 * 2**30)
    parts, gradients = batch.run(memory_budget=2 * 2**30)
    torch.testing.assert_close(whole.loss, parts.loss, rtol=1e-4, atol=1e-4)
    assert largest_error(gradients, [target.double() for target in whole_gradients]) < 5e-3
