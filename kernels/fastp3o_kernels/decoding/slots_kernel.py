"""What a step of decoding does for its slots besides the model's work, in a launch each (PyTorch: 9
and 16).

R slots, P prompts, N = P K responses, of Lr tokens at most.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastp3o_kernels.decoding.batch import Batch, Working

WARPS = 4


@triton.jit(do_not_specialize=["R"])
def members_kernel(
    response_ptr,  # [R] int64
    cached_lengths_ptr,  # [P + 1] int64
    prompt_ptr,  # [R] int64, out
    prompt_lengths_ptr,  # [R] int64, out
    members_ptr,  # [R, K] int32, out
    R,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """As `Slots` says, one program for each slot."""
    slot = tl.program_id(0)
    prompt = tl.load(response_ptr + slot) // K
    tl.store(prompt_ptr + slot, prompt)
    tl.store(prompt_lengths_ptr + slot, tl.load(cached_lengths_ptr + prompt))
    other = tl.arange(0, BLOCK_R)
    response = tl.load(response_ptr + other, mask=other < R, other=-K)
    last = tl.max(tl.where(response // K == prompt, other, -1), axis=0)
    for k in range(K):
        member = tl.max(tl.where(response == prompt * K + k, other, -1), axis=0)
        tl.store(members_ptr + slot * K + k, tl.where(last == slot, member, -1))


@triton.jit(do_not_specialize=["R", "N", "Lr", "last_end"])
def take_kernel(
    tokens_ptr,  # [R] int64
    logprobs_ptr,  # [R] fp32
    response_ptr,  # [R] int64, in and out
    steps_ptr,  # [R] int64, in and out
    inputs_ptr,  # [R] int64, out
    sampled_ptr,  # [N + 1, Lr] int64, out
    sampled_logprobs_ptr,  # [N + 1, Lr] fp32, out
    first_tokens_ptr,  # [N + 1] int64
    ends_ptr,  # [last_end + 1] bytes
    total_ptr,  # [] int64
    taken_ptr,  # [] int64, in and out
    R,
    N,
    Lr,
    last_end,
    BLOCK_R: tl.constexpr,
):
    """As `take_tokens`, one program for all slots."""
    slot = tl.arange(0, BLOCK_R)
    inside = slot < R
    token = tl.load(tokens_ptr + slot, mask=inside, other=0)
    response = tl.load(response_ptr + slot, mask=inside, other=0)
    step = tl.load(steps_ptr + slot, mask=inside, other=0)
    place = response * Lr + step
    tl.store(sampled_ptr + place, token, mask=inside)
    tl.store(
        sampled_logprobs_ptr + place,
        tl.load(logprobs_ptr + slot, mask=inside, other=0.0),
        mask=inside,
    )
    is_end = tl.load(ends_ptr + tl.minimum(token, last_end), mask=inside, other=0) != 0
    ended = inside & (is_end | (step + 1 == Lr))
    taken = tl.load(taken_ptr)
    following = taken + tl.cumsum(ended.to(tl.int64), axis=0)
    tl.store(taken_ptr, taken + tl.sum(ended.to(tl.int64), axis=0))
    following = tl.where(following < tl.load(total_ptr), following, N)
    response = tl.where(ended, following, response)
    first = tl.load(first_tokens_ptr + response, mask=ended, other=0)
    tl.store(response_ptr + slot, response, mask=inside)
    tl.store(steps_ptr + slot, tl.where(ended, 0, step + 1), mask=inside)
    tl.store(inputs_ptr + slot, tl.where(ended, first, token), mask=inside)


def launch_members(
    response: Tensor, cached_lengths: Tensor, K: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`Slots`' prompt, prompt_lengths and members."""
    R = len(response)
    prompt, prompt_lengths = torch.empty_like(response), torch.empty_like(response)
    members = torch.empty(R, K, dtype=torch.int32, device=response.device)
    with torch.cuda.device_of(response):
        members_kernel[(R,)](
            *(response, cached_lengths, prompt, prompt_lengths, members, R),
            K=K,
            BLOCK_R=triton.next_power_of_2(R),
            num_warps=WARPS,
        )
    return prompt, prompt_lengths, members


def launch_take(tokens: Tensor, logprobs: Tensor, slots: Working, batch: Batch) -> None:
    """As `take_tokens`, for contiguous tensors."""
    rows, Lr = batch.sampled.shape
    R, ends = len(tokens), batch.ends.view(torch.uint8)
    with torch.cuda.device_of(tokens):
        take_kernel[(1,)](
            *(tokens, logprobs, *slots, batch.sampled, batch.logprobs, batch.first_tokens, ends),
            *(batch.total, batch.taken, R, rows - 1, Lr, len(ends) - 1),
            BLOCK_R=triton.next_power_of_2(R),
            num_warps=WARPS,
        )
