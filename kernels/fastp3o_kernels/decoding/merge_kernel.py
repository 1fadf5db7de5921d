"""Results of attention over chunks of keys -> attention over all of them, weighted by the chunks' logsumexp.

R slots, H heads, D the size of a head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastp3o_kernels.decoding.cache import Slots

# Chunks that a program reads at once. There are few, and programs are many and small.
BLOCK_S = 8
WARPS = 1


@triton.jit(do_not_specialize=["prompts"])
def merge_kernel(
    partials_ptr,  # [R, H, CHUNKS, D] fp32
    lse_ptr,  # [R, H, CHUNKS] fp32, base 2
    prompt_ptr,  # [R] int64
    prompt_lengths_ptr,  # [R] int64
    steps_ptr,  # [R] int64
    out_ptr,  # [R, H, D], out; 0 in idle slots
    prompts,
    H: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    PROMPT_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    here = slot * H + tl.program_id(1)
    busy = tl.load(prompt_ptr + slot) < prompts
    length = tl.load(prompt_lengths_ptr + slot)
    step = tl.load(steps_ptr + slot)
    d = tl.arange(0, BLOCK_D)
    running_max = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    result = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, CHUNKS, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        # Of the others an earlier step may have left results.
        written = tl.where(s < PROMPT_CHUNKS, s * CHUNK < length, (s - PROMPT_CHUNKS) * CHUNK <= step)
        lse = tl.load(lse_ptr + here * CHUNKS + s, mask=written & (s < CHUNKS) & busy, other=-float("inf"))
        new_max = tl.maximum(running_max, tl.max(lse, axis=0))
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(lse - base)
        decay = tl.exp2(running_max - base)
        total = total * decay + tl.sum(weights, axis=0)
        of_chunks = (weights > 0.0)[:, None] & (d < D)[None, :]
        partials = tl.load(partials_ptr + (here * CHUNKS + s)[:, None] * D + d[None, :], mask=of_chunks, other=0.0)
        result = result * decay + tl.sum(partials * weights[:, None], axis=0)
        running_max = new_max
    out = result / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + here * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


def launch_merge(
    partials: Tensor, lse: Tensor, slots: Slots, prompts: int, prompt_chunks: int, chunk: int, dtype: torch.dtype
) -> Tensor:
    """[R, H, D] of partials [R, H, chunks, D] and lse [R, H, chunks], base 2; one launch.

    prompt_chunks: how many of the chunks are the prompt's; they come first. chunk: keys of each.
    """
    R, H, chunks, D = partials.shape
    out = torch.empty(R, H, D, dtype=dtype, device=partials.device)
    with torch.cuda.device_of(partials):
        merge_kernel[(R, H)](
            partials,
            lse,
            slots.prompt,
            slots.prompt_lengths,
            slots.steps,
            out,
            prompts,
            H=H,
            D=D,
            CHUNK=chunk,
            PROMPT_CHUNKS=prompt_chunks,
            CHUNKS=chunks,
            BLOCK_D=triton.next_power_of_2(D),
            BLOCK_S=BLOCK_S,
            num_warps=WARPS,
        )
    return out
