"""The least probability that top-p keeps, in one launch that sorts nothing. R rows, V vocabulary.

A probability is kept if those above it sum to less than the share. This holds from some value on,
which is found by bisection: the bits of non-negative fp32 numbers, read as integers, have the
numbers' order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# A program reads one row again and again, from the L2 cache: 32 KiB in flight, four 16-byte loads
# for each thread.
BLOCK_V = tl.constexpr(8192)
WARPS = 16
# Loads of a thread that share an accumulator, so that the loop needs no exchange between threads.
GROUP = tl.constexpr(4)
# The compiler would spill to make room for a second program.
REGISTERS = 65536 // (32 * WARPS)
# Units of a sum of probabilities. Sums are of int64, whose order does not matter, and stay below 2.
UNITS = tl.constexpr(2.0**62)


@triton.jit
def split_at(probs_ptr, middle, V: tl.constexpr):
    """The sum of the probabilities whose bits are above middle, the bits of their least, and of the
    others' largest.
    """
    columns = (
        tl.arange(0, GROUP)[:, None] * (BLOCK_V // GROUP) + tl.arange(0, BLOCK_V // GROUP)[None, :]
    )
    sums = tl.zeros([BLOCK_V // GROUP], tl.int64)
    least = tl.full([BLOCK_V // GROUP], 0x7FFFFFFF, tl.int32)
    largest = tl.full([BLOCK_V // GROUP], -1, tl.int32)
    # Whole blocks have no mask: one that cuts a row at an odd place splits loads into single
    # elements.
    WHOLE: tl.constexpr = V // BLOCK_V * BLOCK_V
    for rest in tl.static_range(2):
        for start in range(rest * WHOLE, V if rest else WHOLE, BLOCK_V):
            # Tokens of probability 0 beyond the vocabulary change nothing.
            probs = tl.load(
                probs_ptr + start + columns, mask=(start + columns < V) | (rest == 0), other=0.0
            )
            bits = probs.to(tl.int32, bitcast=True)
            above = bits > middle
            sums += tl.sum((tl.where(above, probs, 0.0) * UNITS).to(tl.int64), axis=0)
            least = tl.minimum(least, tl.min(tl.where(above, bits, 0x7FFFFFFF), axis=0))
            largest = tl.maximum(largest, tl.max(tl.where(above, -1, bits), axis=0))
    return tl.sum(sums, axis=0), tl.min(least, axis=0), tl.max(largest, axis=0)


@triton.jit
def top_p_kernel(probs_ptr, least_ptr, top_p: tl.float64, V: tl.constexpr):
    """probs [R, V] fp32 -> least [R] fp32."""
    row = tl.program_id(0).to(tl.int64)
    probs_ptr += row * V
    total, least, _ = split_at(probs_ptr, -1, V)
    share = top_p * total.to(tl.float64)
    # The bits of a value that is not kept, and of one that is.
    low, high = least - 1, (total.to(tl.float32) / UNITS).to(tl.int32, bitcast=True)
    while high - low > 1:
        above, least, largest = split_at(probs_ptr, low + (high - low) // 2, V)
        # No probability lies between `largest` and `least`: an end moves to the one that the row
        # has.
        kept = above.to(tl.float64) < share
        low, high = tl.where(kept, low, least - 1), tl.where(kept, largest, high)
    tl.store(least_ptr + row, high.to(tl.float32, bitcast=True))


def launch_top_p(probs: Tensor, top_p: float) -> Tensor:
    """probs [R, V] fp32, whose rows sum to less than 2 -> [R] fp32: the least probability that is
    kept; one launch.

    Sums are exact, but for what a probability below 2^-39 has under 2^-62, and are compared in
    fp64. Cumulative sums of a sorted row in fp64 are exact down to probabilities of 2^-29. So equal
    probabilities and round shares give the same result, and others differ only where a sum is
    within V 2^-52 of the share, which no rounded sum can decide.
    """
    R, V = probs.shape
    least = torch.empty(R, dtype=torch.float32, device=probs.device)
    with torch.cuda.device_of(probs):
        top_p_kernel[(R,)](
            probs.contiguous(), least, top_p, V=V, num_warps=WARPS, maxnreg=REGISTERS
        )
    return least
