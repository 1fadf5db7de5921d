"""Sampling at temperature 1 from the whole vocabulary, in one launch that reads the logits once
(PyTorch: about 40).

R slots, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# A program samples for one slot. A GPU has more processors than there are programs, so each program
# keeps much in flight: 32 KiB, four 16-byte loads for each of 512 threads.
TILE = 8192
WARPS = 16


@triton.jit
def exponentials(key, number):
    """As `sampling.exponentials`, in fp64."""
    bits = key.to(tl.uint64) + (number + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    bits = bits ^ (bits >> 31)
    uniform = ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(uniform)


@triton.jit
def race_kernel(
    logits_ptr,  # [R, V] fp32, rows at any stride
    keys_ptr,  # [R] int64
    steps_ptr,  # [R] int64
    tokens_ptr,  # [R] int64, out
    logprobs_ptr,  # [R] fp32, out
    sums_ptr,  # [R, BLOCKS] fp32, scratch
    row_stride,
    V: tl.constexpr,
    B: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,  # a power of two
):
    """As `sampling.race`: blocks of B tokens race first, by their logsumexp, then the tokens of the
    winning block.
    """
    slot = tl.program_id(0).to(tl.int64)
    logits_ptr += slot * row_stride
    sums_ptr += slot * BLOCKS
    key = tl.load(keys_ptr + slot)
    number = tl.load(steps_ptr + slot) * (B + BLOCKS)
    in_block = tl.arange(0, B)
    t = tl.arange(0, BLOCKS_AT_ONCE)
    running_max = tl.full([BLOCKS_AT_ONCE], -float("inf"), tl.float32)
    total = tl.zeros([BLOCKS_AT_ONCE], tl.float32)
    # Whole tiles have no mask: one that cuts a row at an odd place splits loads into single
    # elements.
    WHOLE: tl.constexpr = V // B // BLOCKS_AT_ONCE * BLOCKS_AT_ONCE
    for rest in tl.static_range(2):
        for first in range(rest * WHOLE, BLOCKS if rest else WHOLE, BLOCKS_AT_ONCE):
            block = first + t
            tokens = block[:, None] * B + in_block[None, :]
            x = tl.load(
                logits_ptr + tokens, mask=(tokens < V) | (rest == 0), other=-float("inf")
            ).to(tl.float32)
            block_max = tl.max(x, axis=1)
            # If every logit is -inf there is no maximum to subtract.
            base = tl.where(block_max == -float("inf"), 0.0, block_max)
            block_sum = tl.sum(tl.exp(x - base[:, None]), axis=1)
            tl.store(
                sums_ptr + block, base + tl.log(block_sum), mask=(block < BLOCKS) | (rest == 0)
            )
            new_max = tl.maximum(running_max, block_max)
            base = tl.where(new_max == -float("inf"), 0.0, new_max)
            total = total * tl.exp(running_max - base) + block_sum * tl.exp(block_max - base)
            running_max = new_max
    # In the loop all threads of a warp would draw a block's number, in fp64; so each draws that of
    # another block.
    tl.debug_barrier()
    block = tl.arange(0, ALL_BLOCKS)
    sums = tl.load(sums_ptr + block, mask=block < BLOCKS, other=-float("inf"))
    winner = tl.argmax(sums.to(tl.float64) - tl.log(exponentials(key, number + B + block)), axis=0)
    tokens = winner * B + in_block
    x = tl.load(logits_ptr + tokens, mask=tokens < V, other=-float("inf")).to(tl.float32)
    chosen = tl.argmax(x.to(tl.float64) - tl.log(exponentials(key, number + in_block)), axis=0)
    logit = tl.max(tl.where(in_block == chosen, x, -float("inf")), axis=0)
    row_max = tl.max(running_max, axis=0)
    log_sum = tl.log(tl.sum(total * tl.exp(running_max - row_max), axis=0))
    tl.store(tokens_ptr + slot, (winner * B + chosen).to(tl.int64))
    tl.store(logprobs_ptr + slot, (logit - row_max) - log_sum)


def tile(V: int, B: int) -> dict[str, int]:
    blocks = triton.cdiv(V, B)
    return {
        "BLOCKS": blocks,
        "BLOCKS_AT_ONCE": max(min(TILE, triton.next_power_of_2(V)) // B, 1),
        "ALL_BLOCKS": triton.next_power_of_2(blocks),
    }


def launch_race(logits: Tensor, keys: Tensor, steps: Tensor, B: int) -> tuple[Tensor, Tensor]:
    """Tokens [R] int64 and their log-probabilities [R] fp32, in one launch. B: size of a block, a
    power of two.
    """
    R, V = logits.shape
    blocks = tile(V, B)
    tokens = torch.empty(R, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(R, dtype=torch.float32, device=logits.device)
    sums = torch.empty(R, blocks["BLOCKS"], dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        race_kernel[(R,)](
            logits,
            keys,
            steps,
            tokens,
            logprobs,
            sums,
            logits.stride(0),
            V=V,
            B=B,
            **blocks,
            num_warps=WARPS,
        )
    return tokens, logprobs
