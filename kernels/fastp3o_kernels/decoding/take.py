"""The end of a step: each slot keeps the token that it sampled, and takes the next response where
its own has ended.

R slots, N responses, of Lr tokens at most.
"""

import torch
from torch import Tensor

from fastp3o_kernels.decoding.batch import Batch, Working
from fastp3o_kernels.operation import HAS_TRITON, use_triton

if HAS_TRITON:
    from fastp3o_kernels.decoding.slots_kernel import launch_take


def take_tokens(
    tokens: Tensor,
    logprobs: Tensor,
    slots: Working,
    batch: Batch,
    *,
    any_left: bool = True,
    impl: str | None = None,
) -> None:
    """Writes to all of `slots`, and to the batch's tokens, log-probabilities and `taken`. The host
    never waits.

    Args:
        tokens: [R] int64 that the slots sampled.
        logprobs: [R] fp32, theirs.
        slots: as they were in the step. Each idle one counts as one whose response has ended.
        batch: with as many tokens at most as `sampled` has columns.
        any_left: False if the slots have had all responses from the first step on, which saves
            PyTorch some work.
        impl: None, "triton" or "eager", as in `token_logprobs`.
    """
    if use_triton(impl, tokens, logprobs, *slots) and len(tokens):
        return launch_take(tokens, logprobs, slots, batch)
    place, idle = (slots.response, slots.steps), len(batch.sampled) - 1
    batch.sampled.index_put_(place, tokens)
    batch.logprobs.index_put_(place, logprobs)
    slots.steps.add_(1)
    ended = batch.ends[tokens.clamp(max=len(batch.ends) - 1)] | (
        slots.steps == batch.sampled.shape[1]
    )
    slots.steps.masked_fill_(ended, 0)
    if not any_left:
        slots.tokens.copy_(tokens)
        slots.response.masked_fill_(ended, idle)
        return None
    # Idle slots count too: none is left for them, nor for those after them.
    following = batch.taken + ended.cumsum(0)
    batch.taken.copy_(following[-1])
    following = following.masked_fill(following >= batch.total, idle)
    torch.where(ended, following, slots.response, out=slots.response)
    torch.where(ended, batch.first_tokens[slots.response], tokens, out=slots.tokens)
    return None
