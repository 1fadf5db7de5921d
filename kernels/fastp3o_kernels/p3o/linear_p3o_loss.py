"""Hidden states and the head's weight -> P3O's loss, and back, never all logits at once.

A coefficient dL/d log π depends only on the responses to its own prompt. So a chunk of whole pairs goes all the way,
hidden states -> logits -> log-probs -> coefficients -> gradients, before the next: three matrix products in all, where
a loss that needs every log-prob first computes the logits twice.

N tokens, D hidden size, V vocabulary, F = N V D; P prompts with K responses each: a pair in the paper, where K is 2.
Sequence K p + k is response k of prompt p.
"""

from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor

from fastp3o_kernels.checks import check_head, check_objective, check_same_device
from fastp3o_kernels.dispatch import use_triton
from fastp3o_kernels.head.backward import HeadGradients
from fastp3o_kernels.head.chunks import Chunks
from fastp3o_kernels.head.forward import ChunkedHead, Products
from fastp3o_kernels.head.linear_logprobs import chunks_for
from fastp3o_kernels.p3o import eager
from fastp3o_kernels.p3o.logits_p3o_loss import NO_LABEL
from fastp3o_kernels.p3o.objective import Objective, P3OLossOutput
from fastp3o_kernels.p3o.pair_kernel import PairInputs, check_token_pairs, output, pair_loss, spread
from fastp3o_kernels.rows.transform import LogitsTransform

# fp16 ends at 65504 and is coarse below 6e-5. Where the products are fp16, gradients of logits are kept at the scale of
# a loss that is a sum, times this: a probability of 1e-6 keeps three digits, an advantage difference may reach 1000.
FP16_SCALE = 64.0


class HeadSettings(NamedTuple):
    softcap: float | None
    temperature: float
    bounds: list[int]  # [P + 1], tokens where the responses to each prompt begin
    products: Products
    chunks: Chunks
    triton: bool


class LinearP3OLoss(torch.autograd.Function):
    """Forward 2 F operations, and 2 F for each gradient; backward multiplies them by the incoming gradient."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, pairs, objective, settings):
        softcap, temperature, bounds, products, chunks, triton = settings
        transform = LogitsTransform(bias, softcap, temperature)
        needs = ctx.needs_input_grad[:3]
        scale = gradient_scale(products, len(hidden), pairs, objective)
        with torch.autocast(hidden.device.type, enabled=False):
            head = ChunkedHead(hidden, weight, labels, transform, NO_LABEL, products, chunks, triton=triton)
            gradients = HeadGradients(head, hidden, weight, bias, needs) if any(needs) else None
            for chunk in chunks.chunks:
                for rows in chunk:
                    head.forward(rows)
                if gradients is None:
                    continue
                first, last = (bisect_left(bounds, token) for token in (chunk[0].start, chunk[-1].stop))
                results, coefficients = pair_loss(
                    head.logprobs, pairs.part(first, last), objective, triton_kernels=triton
                )
                # The last piece's logits are still in their buffer.
                for rows in reversed(chunk):
                    gradients.backward(rows, coefficients[rows] * scale if scale != 1 else coefficients[rows])
            if gradients is None or len(chunks.chunks) > 1:
                results, _ = pair_loss(head.logprobs, pairs, objective, triton_kernels=triton)
            if gradients is not None:
                gradients.finish()
        ctx.gradients, ctx.scale = gradients, scale
        ctx.mark_non_differentiable(results)
        return results[0].clone(), results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, _):
        if ctx.gradients is None:
            raise RuntimeError("the gradients were handed out by the first backward pass; call the loss again")
        gradients, ctx.gradients = ctx.gradients, None
        factor = grad_loss / ctx.scale if ctx.scale != 1 else grad_loss
        return *gradients.times(factor), *[None] * 4


class OnPolicyLinearP3OLoss(torch.autograd.Function):
    """The loss needs no logits; backward computes them once, for tokens with a coefficient alone: at most 6 F."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, pairs, objective, settings):
        logprobs = spread(pairs.old_logprobs.to(settings.products.logits), pairs.cu_seqlens, len(hidden))
        results, coefficients = pair_loss(
            logprobs, pairs._replace(old_token_logprobs=logprobs), objective, triton_kernels=settings.triton
        )
        ctx.save_for_backward(hidden, weight, bias, labels, coefficients)
        ctx.settings = settings
        ctx.mark_non_differentiable(results)
        return results[0].clone(), results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, _):
        hidden, weight, bias, labels, coefficients = ctx.saved_tensors
        softcap, temperature, _, products, chunks, triton = ctx.settings
        transform = LogitsTransform(bias, softcap, temperature)
        with torch.autocast(hidden.device.type, enabled=False):
            rows_left = coefficients.nonzero().squeeze(1)
            everything = len(rows_left) == len(hidden)
            some = hidden if everything else hidden[rows_left]
            if not everything:
                labels, coefficients = labels[rows_left], coefficients[rows_left]
            head = ChunkedHead(some, weight, labels, transform, NO_LABEL, products, chunks, triton=triton)
            gradients = HeadGradients(head, some, weight, bias, ctx.needs_input_grad[:3])
            coefficients = coefficients * grad_loss
            for begin in range(0, len(some), chunks.logits_rows):
                rows = slice(begin, min(begin + chunks.logits_rows, len(some)))
                gradients.on_policy(rows, coefficients[rows])
            dhidden, dweight, dbias = gradients.times(torch.ones_like(grad_loss))
        if dhidden is not None and not everything:
            dhidden = torch.zeros_like(hidden).index_copy_(0, rows_left, dhidden)
        return dhidden, dweight, dbias, *[None] * 4


def gradient_scale(products: Products, tokens: int, pairs: PairInputs, objective: Objective) -> float:
    """What the coefficients are multiplied by until backward: 1 unless they would be lost in fp16."""
    if products.scratch != torch.float16:
        return 1.0
    return FP16_SCALE * (
        tokens if objective.clipping == "token" else pairs.responses_per_prompt * pairs.averaged_prompts
    )


def linear_p3o_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    rewards: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    clipping: str = "joint",
    clip_range: float = 0.2,
    ratio_cap: float = 10.0,
    kl_coef: float = 0.05,
    kl_reward: str = "current",
    old_token_logprobs: Tensor | None = None,
    on_policy: bool = False,
    memory_budget: int | None = None,
    impl: str | None = None,
) -> P3OLossOutput:
    """P3O's loss from the hidden states that predict the tokens of the responses to P prompts.

    Only the gradients that are needed are computed, in the forward pass: a frozen head costs 4 F operations, frozen
    hidden states 4 F, both 2 F. Tokens of clipped pairs and of pairs of equal advantage take no part in the gradients'
    products; for that the host reads a flag for each token once per full buffer. The backward pass multiplies by the
    incoming gradient, which takes no time where it is 1, and can run once.

    Args:
        hidden: [N, D], the hidden states that predict the response tokens. weight: [V, D]. labels: [N], the response
            tokens, end-of-sequence included. bias, temperature, softcap: all as in `linear_logprobs`.
        cu_seqlens: [P K + 1] int32 or int64, where each response begins in [N]. It is needed on the host: a tensor on
            the CPU spares waiting for the device.
        old_logprobs, ref_logprobs, rewards: [P, K].
        old_token_logprobs: [N], for clipping="token" and only there.
        on_policy: old_logprobs are this very policy's (the first step after a rollout). Ratios are then 1 by
            definition; loss and metrics follow from old_logprobs without a look at the logits, and the backward pass
            computes logits and gradients in one go, none of it for tokens without a coefficient.
        memory_budget: bytes of scratch for logits and their gradient, as in `linear_logprobs`. Responses to a prompt
            whose logits it does not hold are computed in two passes: what fits is kept, the rest computed twice, with
            the same result.
        impl: as in `linear_logprobs`.
        others: as in `p3o_loss`.

    Returns:
        P3OLossOutput; the gradient reaches hidden, weight and bias.

    Raises:
        ValueError: as in `linear_logprobs` and `p3o_loss`.
        RuntimeError: for a second backward pass.
    """
    objective = Objective(clipping, clip_range, ratio_cap, kl_coef, kl_reward)
    check_objective(*objective)
    check_head(hidden, weight, labels, bias, temperature, softcap, ignore_index=None)
    check_token_pairs(
        len(hidden), cu_seqlens, old_logprobs, ref_logprobs, rewards, clipping, old_token_logprobs, on_policy=on_policy
    )
    check_same_device(
        hidden=hidden,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        rewards=rewards,
        old_token_logprobs=old_token_logprobs,
    )
    given = [hidden, weight, bias, old_logprobs, ref_logprobs, rewards, old_token_logprobs]
    triton = use_triton(impl, *[tensor for tensor in given if tensor is not None])
    products = Products(hidden)
    on_host, cu_seqlens = cu_seqlens, cu_seqlens.to(hidden.device, non_blocking=True)
    if impl == "eager":
        logits = eager.linear_logits(hidden, weight, bias, softcap, products.operands)
        logprobs = eager.token_logprobs(logits, labels, temperature=temperature, ignore_index=NO_LABEL)
        if on_policy:
            known = spread(old_logprobs.to(logprobs.dtype), cu_seqlens, len(logprobs))
            logprobs, old_token_logprobs = eager.with_values(logprobs, known), known
        return eager.token_loss(
            logprobs, cu_seqlens, old_token_logprobs, old_logprobs, ref_logprobs, rewards, objective
        )
    if not torch.is_grad_enabled():
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    bounds = on_host[:: rewards.shape[1]].tolist()
    chunks = chunks_for(bounds, len(weight), products, memory_budget)
    loss, results = (OnPolicyLinearP3OLoss if on_policy else LinearP3OLoss).apply(
        hidden,
        weight,
        bias,
        labels.contiguous(),
        PairInputs(cu_seqlens, old_logprobs, ref_logprobs, rewards, old_token_logprobs, len(rewards)),
        objective,
        HeadSettings(softcap, temperature, bounds, products, chunks, triton),
    )
    return output(results, loss)
