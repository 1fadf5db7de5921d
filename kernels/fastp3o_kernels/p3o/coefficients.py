"""Token log-probs of pairs -> loss, metrics and dL/d log π of each token, with either implementation."""

from dataclasses import replace

import torch
from torch import Tensor

from fastp3o_kernels.dispatch import HAS_TRITON
from fastp3o_kernels.p3o import eager
from fastp3o_kernels.p3o.pairs import PairInputs
from fastp3o_kernels.p3o.settings import P3OSettings

if HAS_TRITON:
    from fastp3o_kernels.p3o.pair_kernel import launch_pairs


def loss_and_coefficients(
    token_logprobs: Tensor, pairs: PairInputs, settings: P3OSettings, *, triton: bool
) -> tuple[Tensor, Tensor]:
    """RESULTS [7], and dL/d log π of each token of the pairs [N]; tokens outside them have none (with Triton: no
    defined) coefficient.
    """
    if triton:
        return launch_pairs(token_logprobs, pairs, settings)
    tokens = slice(int(pairs.cu_seqlens[0]), int(pairs.cu_seqlens[-1]))
    old = pairs.old_token_logprobs
    own = replace(
        pairs, cu_seqlens=pairs.cu_seqlens - tokens.start, old_token_logprobs=None if old is None else old[tokens]
    )
    coefficients = torch.zeros_like(token_logprobs)
    # In inference mode there are no gradients to ask for, nor anybody who would.
    differentiates = not torch.is_inference_mode_enabled()
    with torch.set_grad_enabled(differentiates):
        own_logprobs = token_logprobs[tokens].detach().requires_grad_(differentiates)
        loss, metrics = eager.token_loss(own_logprobs, own, settings)
        if differentiates:
            (coefficients[tokens],) = torch.autograd.grad(loss, own_logprobs)
    return torch.stack([loss.detach(), *(metric.to(loss.dtype) for metric in metrics.values())]), coefficients


def on_policy_loss_and_coefficients(
    pairs: PairInputs, tokens: int, dtype: torch.dtype, settings: P3OSettings, *, triton: bool
) -> tuple[Tensor, Tensor]:
    """The same where old_logprobs are the policy's own: from these alone, for so many tokens, in `dtype`."""
    logprobs, pairs = pairs.on_policy(tokens, dtype)
    return loss_and_coefficients(logprobs, pairs, settings, triton=triton)
