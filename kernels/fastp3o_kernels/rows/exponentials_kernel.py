"""Logits -> the log-probability of each label, and exponentials that are the gradient but for a
factor of each row.

dL/d(logit v) = c (1[v is the label] - p_v) / T, and p_v = e_v / S, the exponential of a logit over
the sum of its row. So the gradient is -c / (T S) times e_v, and e - S at the label. The factor is
one of a row of the gradient's products, and need not be known before the row is written: logits are
read once.

What was sampled is never far below the largest logit, so exponentials are relative to the label's,
which is known before its row is read. A row where that is too far off is read again.

N rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastp3o_kernels.rows.logits_kernel import (
    LOG2E,
    ROW_NUMBERS,
    exp2,
    group_size,
    load_logits,
    max_and_sum,
    row_arguments,
)
from fastp3o_kernels.rows.rows import Rows

WARPS = 8
# Exponential of the label, and the sum of a row that is read again, in base 2: fp16 ends at 2^16
# and is coarse below 2^-14, so that probabilities of a millionth of the label's have ten bits.
LABEL, LABEL_LOG2 = tl.constexpr(16.0), tl.constexpr(4.0)
SUM_LOG2 = tl.constexpr(14.0)
# Sums from here on are another row's: an entry of fp16 would overflow, or a product in fp32.
LARGEST_SUMS = {torch.float16: 2.0**15, torch.bfloat16: 2.0**60, torch.float32: 2.0**60}


@triton.jit
def write_exponentials(
    logits_ptr,
    out_ptr,
    writes,
    softcap,
    center,
    to_base_2,
    shift,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The sum of 2^((logit - center) to_base_2 + shift) over a row. If `writes`, out_ptr gets them,
    times the logit's slope under the soft cap.
    """
    sums = tl.zeros([BLOCK_V], dtype=tl.float32)
    WHOLE: tl.constexpr = V // BLOCK_V * BLOCK_V
    for rest in tl.static_range(2):
        for start in range(rest * WHOLE, V if rest else WHOLE, BLOCK_V):
            columns = start + tl.arange(0, BLOCK_V)
            inside = (columns < V) | (rest == 0)
            x, slope = load_logits(logits_ptr, None, columns, inside, softcap)
            exponentials = exp2((x - center) * to_base_2 + shift)
            sums += exponentials
            entries = (exponentials * slope).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + columns, entries, mask=inside & writes)
    return tl.sum(sums, axis=0)


@triton.jit
def write_zeros(out_ptr, V: tl.constexpr, BLOCK_V: tl.constexpr):
    WHOLE: tl.constexpr = V // BLOCK_V * BLOCK_V
    for rest in tl.static_range(2):
        for start in range(rest * WHOLE, V if rest else WHOLE, BLOCK_V):
            columns = start + tl.arange(0, BLOCK_V)
            zeros = tl.zeros([BLOCK_V], dtype=out_ptr.dtype.element_ty)
            tl.store(out_ptr + columns, zeros, mask=(columns < V) | (rest == 0))


@triton.jit(
    do_not_specialize=["ignore_index", "writes"],
    do_not_specialize_on_alignment=[*ROW_NUMBERS, "sums_ptr"],
)
def exponentials_kernel(
    logits_ptr,  # [N, V], rows at any stride
    labels_ptr,  # [N]
    out_ptr,  # [N, V], out: exponentials, and at the label its own less the sum
    logprobs_ptr,  # [N] fp32, out
    sums_ptr,  # [N] fp32, out: of the exponentials; NaN where a row has none, whose entries are 0
    writes,  # 0: nothing is written there. In one kernel, so that sums have the same order and the same bits
    row_stride,
    out_row_stride,
    inverse_temperature,
    softcap,  # None: logits are not capped
    ignore_index,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    out_ptr += row * out_row_stride
    writes = writes != 0
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        if writes:
            write_zeros(out_ptr, V, BLOCK_V)
        tl.store(logprobs_ptr + row, 0.0)
        tl.store(sums_ptr + row, 1.0)
    else:
        # A label outside the vocabulary gives NaN, not a value from somewhere else in memory.
        within_vocabulary = (label >= 0) & (label < V)
        label_logit, _ = load_logits(logits_ptr, None, label, within_vocabulary, softcap)
        label_logit = tl.where(within_vocabulary, label_logit, float("nan"))
        to_base_2 = inverse_temperature * LOG2E
        center, shift = label_logit, LABEL_LOG2
        sum = write_exponentials(
            logits_ptr, out_ptr, writes, softcap, center, to_base_2, shift, V, BLOCK_V
        )
        logprob = -tl.log(sum / LABEL)
        if (sum < LARGEST) == 0:  # or NaN
            row_max, row_sum = max_and_sum(logits_ptr, None, softcap, to_base_2, V, BLOCK_V, GROUP)
            logprob = (label_logit - row_max) * inverse_temperature - tl.log(row_sum)
            if writes:
                center, shift = row_max, SUM_LOG2 - tl.log2(row_sum)
                sum = write_exponentials(
                    logits_ptr, out_ptr, writes, softcap, center, to_base_2, shift, V, BLOCK_V
                )
                if ((sum > 0.0) & (sum < float("inf"))) == 0:
                    # Nothing that is not finite may reach the products: rows of zero coefficient
                    # multiply it by 0.
                    write_zeros(out_ptr, V, BLOCK_V)
                    sum = float("nan")
        tl.store(logprobs_ptr + row, tl.where(logprob > 0.0, 0.0, logprob))  # by an ulp
        tl.store(sums_ptr + row, sum)
        if writes:
            # Loaded again: a number that lives through the loops costs a register of each thread.
            label_logit, label_slope = load_logits(
                logits_ptr, None, label, within_vocabulary, softcap
            )
            entry = (exp2((label_logit - center) * to_base_2 + shift) - sum) * label_slope
            entry = tl.where(sum == sum, entry, 0.0)
            tl.debug_barrier()  # some thread may store the label's exponential after its entry
            tl.store(out_ptr + label, entry.to(out_ptr.dtype.element_ty), mask=within_vocabulary)


def launch_exponentials(rows: Rows, out: Tensor, *, writes: bool) -> tuple[Tensor, Tensor]:
    """Log-probs and sums of the exponentials, [N] fp32 each; one launch. There must be no bias.

    out: [N, V], which gets the exponentials if `writes`; the log-probs have the same bits with and
    without. They depend on its dtype.
    """
    logits = rows.logits
    logprobs, sums = (
        torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    arguments = row_arguments(rows)
    del arguments["bias_ptr"]
    with torch.cuda.device_of(logits):
        exponentials_kernel[(len(logits),)](
            **arguments,
            out_ptr=out,
            logprobs_ptr=logprobs,
            sums_ptr=sums,
            writes=int(writes),
            out_row_stride=out.stride(0),
            GROUP=group_size(logits),
            LARGEST=LARGEST_SUMS[out.dtype],
        )
    return logprobs, sums
