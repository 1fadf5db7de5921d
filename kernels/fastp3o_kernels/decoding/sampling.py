"""Tokens from logits, with random numbers that are a function of (seed, prompt, response,
position).

The random numbers need no generator state: they are counter-based, number i of the SplitMix64
generator (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)
that starts at a key. The numbers of the seed are the prompts' keys, a prompt's numbers are its
responses' keys, and a response samples with its numbers, the same count at each step. All are
int64, and products wrap around. R slots, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastp3o_kernels.operation import HAS_TRITON, use_triton

if HAS_TRITON:
    from fastp3o_kernels.decoding.sampling_kernel import launch_race
    from fastp3o_kernels.decoding.top_p_kernel import launch_top_p

GAMMA, FIRST, SECOND = (
    constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class Samples(NamedTuple):
    """A token for each slot, and the log-probability with which it was drawn, in nats."""

    tokens: Tensor  # [R] int64
    logprobs: Tensor  # [R] fp32


def sample_tokens(
    logits: Tensor,
    keys: Tensor,
    steps: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    numbers: Tensor | None = None,
    impl: str | None = None,
) -> Samples:
    """Samples a token for each slot, a function of only the slot's logits, key and step.

    The host never waits for the GPU. Logits are left unchanged.

    Args:
        logits: [R, V] fp32.
        keys: [R] int64 from `response_keys`.
        steps: [R] int64, position in the response.
        temperature: divides the logits.
        top_k: only the k most likely tokens, and those equal to the last of them; 0 for all.
        top_p: from these only the fewest most likely ones that sum to this share, and those equal
            to the last.
        min_p: only tokens at least this probable relative to the most likely one (arXiv
            2407.01082).
        numbers: [R, n] fp64, `race_numbers` of these keys and steps, if PyTorch samples and they
            are known.
        impl: None: Triton if it is installed and all tensors are on a GPU, else PyTorch. "triton"
            and "eager" force one, but with settings other than the defaults Triton only finds what
            top_p keeps, where top_k is 0.

    Returns:
        Tokens and log-probabilities [R]: of the distribution that is drawn from, at the temperature
            and without the
        tokens that the other settings leave out.
    """
    if (
        (temperature, top_k, top_p, min_p) == (1, 0, 1, 0)
        and use_triton(impl, logits, keys)
        and logits.numel()
    ):
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        return Samples(
            *launch_race(logits, keys.contiguous(), steps.contiguous(), block_size(logits.shape[1]))
        )
    probs = (logits if temperature == 1 else logits / temperature).softmax(1)
    truncates = bool(top_k or top_p < 1 or min_p)
    if truncates:
        least = least_probability(probs, top_k, top_p, min_p, impl)
        probs.masked_fill_(probs < least[:, None], 0.0)
    tokens = race(probs, race_numbers(keys, steps, probs.shape[1]) if numbers is None else numbers)
    logprobs = probs.gather(1, tokens).log()
    return Samples(
        tokens[:, 0], (logprobs - probs.sum(1, keepdim=True).log() if truncates else logprobs)[:, 0]
    )


def least_probability(
    probs: Tensor, top_k: int, top_p: float, min_p: float, impl: str | None
) -> Tensor:
    """[R]: the least probability of a token that may be sampled."""
    V = probs.shape[1]
    least = probs.amax(1) * min_p
    if not top_k and top_p == 1:
        return least
    if not top_k and use_triton(impl, probs) and len(probs):
        return least.maximum(launch_top_p(probs, top_p))
    most = probs.topk(min(top_k or V, V)).values
    if top_k:
        least = least.maximum(most[:, -1])
    if top_p < 1:
        sums = most.cumsum(1, dtype=torch.float64)
        # The first always counts, and each at which those before it have not reached the share.
        last = (sums[:, :-1] < top_p * sums[:, -1:]).sum(1, keepdim=True)
        least = least.maximum(most.gather(1, last)[:, 0])
    return least


def block_size(V: int) -> int:
    """A power of two about √V, at which a slot needs the fewest random numbers."""
    return 1 << (V.bit_length() // 2)


def race(probs: Tensor, numbers: Tensor) -> Tensor:
    """Tokens [R, 1] in proportion to probs [R, V], which need not sum to 1.

    The token with the largest p / e, where e is exponential, is token i with probability p_i (the
    Gumbel-max trick, without the logarithm). Blocks of the vocabulary race first, then the tokens
    of the winning block: this takes about 2 √V random numbers a slot instead of V. As in a race
    among all tokens, distributions that differ by a total variation d give different tokens with a
    probability of about d.
    """
    V = probs.shape[1]
    B = block_size(V)
    whole = V // B * B
    blocks = probs[:, :whole] if whole < V else probs
    blocks = blocks.view(len(probs), -1, B).sum(2)
    if whole < V:
        blocks = torch.cat([blocks, probs[:, whole:].sum(1, keepdim=True)], dim=1)
    in_block, among_blocks = numbers.split([B, blocks.shape[1]], dim=1)
    first = (blocks / among_blocks).argmax(1, keepdim=True) * B
    tokens = first + torch.arange(B, device=probs.device)
    if whole == V:
        winner = probs.gather(1, tokens)
    else:
        winner = probs.gather(1, tokens.clamp(max=V - 1)).masked_fill_(tokens >= V, 0.0)
    return first + (winner / in_block).argmax(1, keepdim=True)


def race_numbers(keys: Tensor, steps: Tensor, V: int) -> Tensor:
    """[R, n] fp64: the numbers of a race among V tokens."""
    B = block_size(V)
    return exponentials(keys, steps, B + -(-V // B))


def response_keys(seed: int, prompt_numbers: Tensor, responses_per_prompt: int) -> Tensor:
    """[P, K] int64: a key for each response. seed: below 2^63. prompt_numbers: [P] int64, the
    prompts' numbers in the whole run, not in a batch or process.
    """
    prompt_keys = random_bits(prompt_numbers.new_tensor(seed), prompt_numbers)
    return random_bits(
        prompt_keys[:, None], torch.arange(responses_per_prompt, device=prompt_numbers.device)
    )


def exponentials(keys: Tensor, steps: Tensor, count: int) -> Tensor:
    """[R, count] fp64, independent with mean 1: `count` numbers for each response [R] at its step
    [R].
    """
    bits = random_bits(
        keys[:, None], steps[:, None] * count + torch.arange(count, device=keys.device)
    )
    # Middles of 2^52 equal parts of (0, 1), which fp64 holds exactly: never 0 nor 1.
    uniform = logical_shift(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_()


def random_bits(keys: Tensor, numbers: Tensor) -> Tensor:
    """Numbers 0, 1, ... of the generators that start at `keys`; int64, shapes broadcast."""
    bits = keys + (numbers + 1) * GAMMA
    bits ^= logical_shift(bits, 30)
    bits *= FIRST
    bits ^= logical_shift(bits, 27)
    bits *= SECOND
    bits ^= logical_shift(bits, 31)
    return bits


def logical_shift(bits: Tensor, by: int) -> Tensor:
    """Shift to the right that fills with zeros."""
    return (bits >> by).bitwise_and_(2 ** (64 - by) - 1)
