"""The head as one PyTorch graph with all logits: the oracle of the tests, the baseline of the benchmarks.

N tokens, D hidden size, V vocabulary. fp64 inputs are computed in fp64; narrower ones in fp32.
"""

import torch
from torch import Tensor

from fastp3o_kernels.head.head import Head
from fastp3o_kernels.rows import eager, statistics
from fastp3o_kernels.rows.eager import at_least_fp32


def capped_logits(hidden: Tensor, head: Head, rounded: torch.dtype) -> Tensor:
    """Logits [N, V] before the temperature, at least fp32, of hidden [N, D] and weight rounded to a dtype."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = at_least_fp32(hidden.to(rounded)) @ at_least_fp32(head.weight.to(rounded)).T
        if head.bias is not None:
            logits = logits + head.bias
        return logits if head.softcap is None else head.softcap * (logits / head.softcap).tanh()


def linear_logprobs(hidden: Tensor, head: Head, labels: Tensor, ignore_index: int, rounded: torch.dtype) -> Tensor:
    """hidden [N, D], labels [N] -> [N]."""
    logits = capped_logits(hidden, head, rounded)
    return eager.token_logprobs(logits, labels, temperature=head.temperature, ignore_index=ignore_index)


def linear_outputs(
    hidden: Tensor, head: Head, labels: Tensor, ignore_index: int, rounded: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, and entropies, mean logits and is_top, [N] each."""
    logits = capped_logits(hidden, head, rounded) / head.temperature
    logprobs = eager.token_logprobs(logits, labels, temperature=1.0, ignore_index=ignore_index)
    return logprobs, *statistics.of_logits(logits, labels, ignore_index)
