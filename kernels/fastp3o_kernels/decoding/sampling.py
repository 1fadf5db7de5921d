"""Tokens from logits. R slots, V vocabulary."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastp3o_kernels.decoding.noise import exponentials
from fastp3o_kernels.dispatch import HAS_TRITON, use_triton

if HAS_TRITON:
    from fastp3o_kernels.decoding.sampling_kernel import launch_race


class Samples(NamedTuple):
    """A token of each slot, and its log-probability in nats under the softmax of the logits as they were given."""

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
    impl: str | None = None,
) -> Samples:
    """Samples a token for each slot, a function of the slot's logits, key and step alone.

    Nothing in it makes the host wait for a GPU, and logits stay as they are.

    Args:
        logits: [R, V] fp32.
        keys: [R] int64 of `noise.response_keys`. steps: [R] int64, position in the response.
        temperature: divides the logits.
        top_k: only the k most likely tokens and those equal to the last of them; 0 for all.
        top_p: of these only the fewest most likely ones that sum to at least this share, and those equal to the last.
        min_p: only tokens at least this probable relative to the most likely one (arXiv 2407.01082).
        impl: None: Triton where it is installed and all tensors are on a GPU, else PyTorch. "triton" and "eager" force,
            "triton" with the default settings alone; with others it is PyTorch everywhere.

    Returns:
        Tokens and log-probabilities [R]; these do not count the settings in.

    Raises:
        ValueError: for a setting that is out of range.
    """
    check_settings(temperature, top_k, top_p, min_p)
    if (temperature, top_k, top_p, min_p) == (1, 0, 1, 0) and use_triton(impl, logits, keys) and logits.numel():
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        return Samples(*launch_race(logits, keys.contiguous(), steps.contiguous(), block_size(logits.shape[1])))
    probs = (logits if temperature == 1 else logits / temperature).softmax(1)
    if top_k or top_p < 1 or min_p:
        least = least_probability(probs, top_k, top_p, min_p)
        probs.masked_fill_(probs < least[:, None], 0.0)
    tokens = race(probs, keys, steps)
    if temperature == 1:
        logprobs = probs.gather(1, tokens[:, None]).log()
    else:
        logprobs = logits.gather(1, tokens[:, None]) - logits.logsumexp(1, keepdim=True)
    return Samples(tokens, logprobs[:, 0])


def check_settings(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be above 0 and finite, got {temperature}")
    if top_k < 0:
        raise ValueError(f"top_k must be 0 (off) or above, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p must be from 0 to 1, got {min_p}")


def least_probability(probs: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """[R]: that a token must have to be sampled."""
    V = probs.shape[1]
    least = probs.amax(1) * min_p
    if not top_k and top_p == 1:
        return least
    most = probs.topk(min(top_k or V, V)).values
    if top_k:
        least = least.maximum(most[:, -1])
    if top_p < 1:
        before = most.cumsum(1, dtype=torch.float64) - most
        # The last token before which less than the share was reached. The first always is one.
        count = (before < top_p * most.sum(1, keepdim=True)).sum(1, keepdim=True)
        least = least.maximum(most.gather(1, count - 1)[:, 0])
    return least


def block_size(V: int) -> int:
    """A power of two about √V, at which a slot needs the fewest random numbers."""
    return 1 << (V.bit_length() // 2)


def race(probs: Tensor, keys: Tensor, steps: Tensor) -> Tensor:
    """Tokens [R] in proportion to probs [R, V], which need not sum to 1.

    The one with the largest p / e, e exponential, is token i with probability p_i (the Gumbel-max trick, without the
    logarithm). First among blocks of the vocabulary, then in the block: about 2 √V random numbers a slot instead of V.
    As with a race among all tokens, a distribution that is off by a total variation d gives another token with a
    probability of about d.
    """
    V = probs.shape[1]
    B = block_size(V)
    whole = V // B * B
    blocks = probs[:, :whole].unflatten(1, (-1, B)).sum(2)
    if whole < V:
        blocks = torch.cat([blocks, probs[:, whole:].sum(1, keepdim=True)], dim=1)
    in_block, among_blocks = exponentials(keys, steps, B + blocks.shape[1]).split([B, blocks.shape[1]], dim=1)
    first = (blocks / among_blocks).argmax(1, keepdim=True) * B
    tokens = first + torch.arange(B, device=probs.device)
    of_block = probs.gather(1, tokens.clamp(max=V - 1))
    if whole < V:
        of_block = of_block.masked_fill_(tokens >= V, 0.0)
    return (first + (of_block / in_block).argmax(1, keepdim=True))[:, 0]
