"""Logits -> entropy, mean logit and whether the label is the likeliest token; and gradients that count the entropy.

The rows have been read once: their largest logit and log-sum are known. N rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastp3o_kernels.rows.logits_kernel import BLOCK_V, WARPS, block_size, load_logits, transform_arguments
from fastp3o_kernels.rows.transform import LogitsTransform


@triton.jit
def statistics_kernel(
    logits_ptr,  # [N, V], rows at any stride
    labels_ptr,  # [N]
    bias_ptr,  # [V] where HAS_BIAS
    max_ptr,  # [N] fp32
    log_sum_ptr,  # [N] fp32
    entropy_ptr,  # [N] fp32, out
    mean_ptr,  # [N] fp32, out
    is_top_ptr,  # [N] bool, out
    row_stride,
    inverse_temperature,
    softcap,
    ignore_index,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    label = tl.load(labels_ptr + row)
    row_max = tl.load(max_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    columns = tl.arange(0, BLOCK_V)
    # Of each thread's own columns: one exchange at the end.
    entropies = tl.zeros([BLOCK_V], dtype=tl.float32)
    totals = tl.zeros([BLOCK_V], dtype=tl.float32)
    for start in range(0, V, BLOCK_V):
        inside = start + columns < V
        x, _ = load_logits(logits_ptr, bias_ptr, start + columns, inside, softcap, HAS_BIAS, HAS_SOFTCAP)
        x *= inverse_temperature
        logprob = (x - row_max) - log_sum
        entropies -= tl.where(logprob == -float("inf"), 0.0, tl.exp(logprob) * logprob)
        totals += tl.where(inside, x, 0.0)
    within_vocabulary = (label >= 0) & (label < V)
    label_logit, _ = load_logits(logits_ptr, bias_ptr, label, within_vocabulary, softcap, HAS_BIAS, HAS_SOFTCAP)
    counts = label != ignore_index
    tl.store(entropy_ptr + row, tl.where(counts, tl.sum(entropies, axis=0), 0.0))
    tl.store(mean_ptr + row, tl.where(counts, tl.sum(totals, axis=0) / V, 0.0))
    tl.store(is_top_ptr + row, counts & (label_logit * inverse_temperature >= row_max))


@triton.jit
def entropy_dlogits_kernel(
    logits_ptr,  # [N, V]
    labels_ptr,  # [N]
    bias_ptr,  # [V] where HAS_BIAS
    max_ptr,  # [N] fp32
    log_sum_ptr,  # [N] fp32
    entropy_ptr,  # [N] fp32
    coefficients_ptr,  # [N] fp32, dL/d(log-prob of the row)
    entropy_coefficients_ptr,  # [N] fp32, dL/d(entropy of the row)
    dlogits_ptr,  # [N, V], out; may be logits_ptr
    row_stride,
    dlogits_row_stride,
    inverse_temperature,
    softcap,
    ignore_index,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    dlogits_ptr += row * dlogits_row_stride
    label = tl.load(labels_ptr + row)
    of_logprob = tl.load(coefficients_ptr + row) * inverse_temperature
    of_entropy = tl.load(entropy_coefficients_ptr + row) * inverse_temperature
    if label == ignore_index:
        of_logprob = 0.0
        of_entropy = 0.0
    row_max = tl.load(max_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    entropy = tl.load(entropy_ptr + row)
    columns = tl.arange(0, BLOCK_V)
    for start in range(0, V, BLOCK_V):
        inside = start + columns < V
        x, slope = load_logits(logits_ptr, bias_ptr, start + columns, inside, softcap, HAS_BIAS, HAS_SOFTCAP)
        logprob = (x * inverse_temperature - row_max) - log_sum
        p = tl.exp(logprob)
        own = tl.where(start + columns == label, 1.0, 0.0)
        dlogits = of_logprob * (own - p) - of_entropy * p * tl.where(p == 0.0, 0.0, logprob + entropy)
        if HAS_SOFTCAP:
            dlogits *= slope
        # A row that counts for nothing holds 0 times what may be NaN.
        dlogits = tl.where((of_logprob == 0.0) & (of_entropy == 0.0), 0.0, dlogits)
        tl.store(dlogits_ptr + start + columns, dlogits.to(dlogits_ptr.dtype.element_ty), mask=inside)


def launch_statistics(
    logits: Tensor, labels: Tensor, row_max: Tensor, log_sum: Tensor, transform: LogitsTransform, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Entropies and mean logits [N] fp32, and is_top [N] bool; one launch."""
    N, V = logits.shape
    entropy, mean_logit = (torch.empty(N, dtype=torch.float32, device=logits.device) for _ in range(2))
    is_top = torch.empty(N, dtype=torch.bool, device=logits.device)
    with torch.cuda.device_of(logits):
        statistics_kernel[(N,)](
            logits,
            labels,
            max_ptr=row_max,
            log_sum_ptr=log_sum,
            entropy_ptr=entropy,
            mean_ptr=mean_logit,
            is_top_ptr=is_top,
            row_stride=logits.stride(0),
            ignore_index=ignore_index,
            **transform_arguments(transform, unused=entropy),
            V=V,
            BLOCK_V=block_size(V, BLOCK_V),
            num_warps=WARPS,
        )
    return entropy, mean_logit, is_top


def launch_entropy_dlogits(
    logits: Tensor,
    labels: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    coefficients: Tensor,
    entropy_coefficients: Tensor,
    transform: LogitsTransform,
    ignore_index: int,
    out: Tensor,
) -> None:
    """out [N, V] = the gradient of the logits; it may be the logits. One launch."""
    N, V = logits.shape
    with torch.cuda.device_of(logits):
        entropy_dlogits_kernel[(N,)](
            logits,
            labels,
            max_ptr=row_max,
            log_sum_ptr=log_sum,
            entropy_ptr=entropy,
            coefficients_ptr=coefficients,
            entropy_coefficients_ptr=entropy_coefficients,
            dlogits_ptr=out,
            row_stride=logits.stride(0),
            dlogits_row_stride=out.stride(0),
            ignore_index=ignore_index,
            **transform_arguments(transform, unused=coefficients),
            V=V,
            BLOCK_V=block_size(V, BLOCK_V),
            num_warps=WARPS,
        )
