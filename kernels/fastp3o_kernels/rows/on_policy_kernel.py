"""Logits -> their gradient in one launch, where the coefficient of every row is known before the forward pass.

With the policy that sampled, ratios are 1 and the advantage difference follows from the old and reference log-probs, so
dL/d log π of each token needs no logits. A program reads its row for the logsumexp and a second time for the gradient;
the second time it comes from L2. N rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastp3o_kernels.rows.logits_kernel import (
    LOAD_BYTES,
    block_size,
    row_logsumexp,
    store_dlogits,
    store_zeros,
    transform_arguments,
)
from fastp3o_kernels.rows.transform import LogitsTransform

# 1024 threads with more than 32 registers each: one program to a processor. So few rows are in flight that all of them
# stay in L2 (132 rows of 128256 bf16 logits are 34 MB of an H200's 60) until they are read again. To keep the memory
# busy all the same, each thread has two 16-byte loads in flight.
BLOCK_BYTES = 32768
WARPS = 32


@triton.jit
def on_policy_kernel(
    logits_ptr,  # [N, V], rows at any stride
    labels_ptr,  # [N]
    bias_ptr,  # [V] where HAS_BIAS
    coefficients_ptr,  # [N] fp32, dL/d(log-prob of the row), times
    scale_ptr,  # [] fp32, the incoming gradient of a scalar loss where HAS_SCALE
    dlogits_ptr,  # [N, V], out; may be logits_ptr
    row_stride,
    dlogits_row_stride,
    inverse_temperature,
    softcap,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    dlogits_ptr += row * dlogits_row_stride
    gradient = tl.load(coefficients_ptr + row) * inverse_temperature
    if HAS_SCALE:
        gradient *= tl.load(scale_ptr)
    if gradient == 0.0:
        store_zeros(dlogits_ptr, V, BLOCK_V)
    else:
        row_max, log_sum = row_logsumexp(
            logits_ptr, bias_ptr, inverse_temperature, softcap, HAS_BIAS, HAS_SOFTCAP, V, BLOCK_V, GROUP
        )
        label = tl.load(labels_ptr + row)
        BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
        for block in range(0, BLOCKS):
            # Backwards: what was read last is the least likely to have left L2.
            store_dlogits(
                logits_ptr,
                bias_ptr,
                dlogits_ptr,
                label,
                gradient,
                row_max,
                log_sum,
                (BLOCKS - 1 - block) * BLOCK_V,
                inverse_temperature,
                softcap,
                HAS_BIAS,
                HAS_SOFTCAP,
                V,
                BLOCK_V,
            )


def launch_on_policy(
    logits: Tensor,
    labels: Tensor,
    coefficients: Tensor,
    scale: Tensor | None,
    transform: LogitsTransform,
    out: Tensor,
) -> None:
    """out [N, V] = the gradient of the logits; it may be the logits. One launch."""
    N, V = logits.shape
    with torch.cuda.device_of(logits):
        on_policy_kernel[(N,)](
            logits,
            labels,
            coefficients_ptr=coefficients,
            scale_ptr=coefficients if scale is None else scale,
            dlogits_ptr=out,
            row_stride=logits.stride(0),
            dlogits_row_stride=out.stride(0),
            HAS_SCALE=scale is not None,
            **transform_arguments(transform, unused=coefficients),
            V=V,
            BLOCK_V=block_size(V, BLOCK_BYTES // logits.element_size()),
            GROUP=LOAD_BYTES // logits.element_size(),
            num_warps=WARPS,
        )
