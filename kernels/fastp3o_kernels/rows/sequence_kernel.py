"""Sums of token log-probs over sequences.

N tokens, S sequences. Every kernel that needs such sums calls `sequence_sums` with this BLOCK_T and
these WARPS: they then add in the same order, and equal log-probs of tokens give a ratio of exactly
1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_S = 2
BLOCK_T = 256
WARPS = 16


@triton.jit
def zero_like(bound):
    """A loop's counter at its start, in the type of its bound: an int32 counter next to int64
    offsets is converted in every step, and these registers made the pair kernel spill on sm_90.
    """
    return bound * 0


@triton.jit
def sequence_bounds(begin_ptr, valid):
    """The first token of each sequence and the one after its last, both 0 for a sequence that is
    not valid. begin_ptr points at the sequences' places in cu_seqlens.
    """
    begin = tl.load(begin_ptr, mask=valid, other=0).to(tl.int64)
    end = tl.load(begin_ptr + 1, mask=valid, other=0).to(tl.int64)
    return begin, end


@triton.jit
def sequence_sums(values_ptr, begin, end, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr):
    sums = tl.zeros([BLOCK_S, BLOCK_T], dtype=tl.float32)
    longest = tl.max(end - begin, axis=0)
    done = zero_like(longest)
    while done < longest:
        tokens = begin[:, None] + done + tl.arange(0, BLOCK_T)[None, :]
        sums += tl.load(values_ptr + tokens, mask=tokens < end[:, None], other=0.0)
        done += BLOCK_T
    return tl.sum(sums, axis=1)


@triton.jit(
    do_not_specialize=["S"], do_not_specialize_on_alignment=["values_ptr", "cu_seqlens_ptr"]
)
def sequence_sums_kernel(
    values_ptr,  # [N] fp32
    cu_seqlens_ptr,  # [S + 1]
    sums_ptr,  # [S] fp32, out
    S,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    sequence = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    valid = sequence < S
    begin, end = sequence_bounds(cu_seqlens_ptr + sequence, valid)
    tl.store(
        sums_ptr + sequence, sequence_sums(values_ptr, begin, end, BLOCK_S, BLOCK_T), mask=valid
    )


def launch_sequence_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] fp32 -> [S] fp32; one launch."""
    S = len(cu_seqlens) - 1
    sums = torch.empty(S, dtype=torch.float32, device=values.device)
    with torch.cuda.device_of(values):
        sequence_sums_kernel[(triton.cdiv(S, BLOCK_S),)](
            values, cu_seqlens, sums, S, BLOCK_S=BLOCK_S, BLOCK_T=BLOCK_T, num_warps=WARPS
        )
    return sums
