from fractions import Fraction
from itertools import accumulate
from math import ceil

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastp3o_kernels.decoding import response_keys, sample_tokens
from fastp3o_kernels.decoding.sampling import exponentials, least_probability, random_bits
from tests.kernels.problems import DEVICE, vocabularies


def chi_squared(tokens: Tensor, probs: Tensor) -> float:
    """χ² in standard deviations from its mean; all tokens expected fewer than 5 times count as one."""
    expected = probs.double() * len(tokens)
    rare = expected < 5
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    counts, expected = (
        torch.cat([x[~rare], x[rare].sum(0, keepdim=True)]) for x in (counts, expected)
    )
    counts, expected = counts[expected > 0], expected[expected > 0]
    degrees = len(expected) - 1
    return (((counts - expected) ** 2 / expected).sum().item() - degrees) / (2 * degrees) ** 0.5


def least_allowed(probs: list[float], top_k: int, top_p: float, min_p: float) -> float:
    """The least probability that may be sampled, by the definitions, in exact arithmetic."""
    most = sorted((int(prob * 2.0**149) for prob in probs), reverse=True)[: top_k or None]
    share = ceil(Fraction(top_p) * sum(most))
    last = next(
        prob for prob, reached in zip(most, accumulate(most), strict=True) if reached >= share
    )
    return float(max(last, Fraction(min_p) * most[0]) / 2**149)


@settings(max_examples=75, deadline=None)
@given(
    V=vocabularies(1, 40),
    scale=st.sampled_from([0.0, 1.0, 1.0, 30.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.just(0) | st.integers(0, 50),
    top_p=st.sampled_from([1e-9, 0.3, 0.75, 0.95, 1 - 1e-9, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_only_allowed_tokens_are_sampled_and_all_of_them(V, scale, temperature, seed, **truncation):
    torch.manual_seed(seed)
    logits, one_hot = scale * torch.randn(3, V), torch.eye(1, V)
    logits[1] = logits[1].mul(4).round() / 4  # ties
    logits[2, (torch.rand(V) < 0.5) & (torch.arange(V) != seed % V)] = -torch.inf
    top_p = torch.tensor(truncation["top_p"])
    at_the_share = (one_hot * top_p + one_hot.roll(1) * (1 - top_p)) / (2 if V == 1 else 1)
    neighbors = (
        torch.full((1, V), 1 / V).view(torch.int32) + torch.arange(V, dtype=torch.int32)
    ).view(torch.float32)
    probs = torch.cat([(logits / temperature).softmax(1), one_hot, at_the_share, neighbors])
    least = [least_allowed(row, **truncation) for row in probs.tolist()]
    allowed = probs >= torch.tensor(least, dtype=torch.float64)[:, None]
    for impl in ("eager", "triton"):
        found = least_probability(probs.to(DEVICE), **truncation, impl=impl).cpu()
        assert torch.equal((probs >= found[:, None]) & (probs > 0), allowed)
    if scale > 1:
        return
    logits, kept, options = (
        logits[seed % 3],
        allowed[seed % 3],
        {"temperature": temperature, **truncation},
    )
    left = logits.where(kept, -torch.inf) / temperature
    keys, steps = response_keys(0, torch.arange(3000), 1)[:, 0], torch.arange(3000) % 11
    tokens = sample_tokens(logits.expand(3000, -1), keys, steps, **options).tokens
    assert kept[tokens].all()
    assert kept.sum() == 1 or abs(chi_squared(tokens, left.softmax(0))) < 6
    same, numbers = logits.expand(9, -1).clone(), torch.arange(9)
    tokens, logprobs = sample_tokens(same, numbers, numbers, **options)
    torch.testing.assert_close(logprobs, left.log_softmax(0)[tokens], atol=2e-6, rtol=1e-6)
    assert torch.equal(same, logits.expand(9, -1))  # they are not overwritten


def test_keys_are_splitmix64s_bits_for_seed_prompt_and_response():
    """The expected numbers are those of the reference implementation
    (prng.di.unimi.it/splitmix64.c) from 1234567.
    """
    bits = random_bits(torch.tensor(1234567), torch.arange(3)).tolist()
    assert [number % 2**64 for number in bits] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    keys = response_keys(3, torch.arange(1000), 4)
    assert len(keys.unique()) == 4000
    assert torch.equal(response_keys(3, torch.tensor([7, 500]), 2), keys[[7, 500], :2])
    assert not torch.isin(response_keys(2**63 - 1, torch.arange(1000), 4), keys).any()


def test_exponentials_are_exponential_and_independent():
    keys, steps = response_keys(0, torch.arange(200), 1)[:, 0], torch.arange(200) % 7
    numbers, n = exponentials(keys, steps, 512), 200 * 512
    assert numbers.dtype == torch.float64
    assert (numbers > 0).all()
    # Kolmogorov-Smirnov, 0.1% level.
    uniform = (1 - (-numbers).exp()).flatten().sort().values
    assert (uniform - torch.arange(n) / n).abs().max() < 1.95 / n**0.5
    # No correlation between neighbors, nor between the same lanes of different keys and steps.
    others = exponentials(keys, steps + 1, 512)
    for a, b in ((numbers[:, 1:], numbers[:, :-1]), (numbers[1:], numbers[:-1]), (numbers, others)):
        assert abs(((a - 1) * (b - 1)).mean()) < 4 / n**0.5
