"""The head as one PyTorch graph with all logits: `impl="eager"`, and the baseline of the
benchmarks.

N tokens, D hidden size, V vocabulary. fp64 inputs are computed in fp64; narrower ones in fp32.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from fastp3o_kernels.head.head import Head
from fastp3o_kernels.rows import eager
from fastp3o_kernels.rows.eager import at_least_fp32
from fastp3o_kernels.rows.logprobs import TokenOutputs, token_outputs


def products(hidden: Tensor, head: Head, rounded: torch.dtype) -> Tensor:
    """hidden [N, D] times the weight, both rounded to a dtype, and the bias: [N, V], at least fp32."""
    logits = at_least_fp32(hidden.to(rounded)) @ at_least_fp32(head.weight.to(rounded)).T
    return logits if head.bias is None else logits + head.bias


def linear_outputs(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    ignore_index: int,
    rounded: torch.dtype,
    outputs: Collection[str] = (),
) -> TokenOutputs:
    """hidden [N, D], labels [N] -> log-probs [N], and the statistics that are asked for."""
    if head.shard is not None and len(hidden) > 0:
        raise ValueError(
            'impl="eager" takes a whole head, and got a shard of one; use impl=None or "triton"'
        )
    with torch.autocast(hidden.device.type, enabled=False):
        logits = products(hidden, head, rounded)
        if head.softcap is not None:
            logits = head.softcap * (logits / head.softcap).tanh()
    logprobs = eager.token_logprobs(
        logits, labels, temperature=head.temperature, ignore_index=ignore_index
    )
    if not outputs:
        return TokenOutputs(logprobs)
    return token_outputs(
        outputs, logprobs, *eager.statistics(logits / head.temperature, labels, ignore_index)
    )
