"""Hidden states and a head -> P3O's loss and its gradients, never all logits at once.

A coefficient dL/d log π depends only on the responses to its own prompt. So a chunk of whole prompts goes all the way,
hidden states -> logits -> log-probs -> coefficients -> gradients, before the next: three matrix products in all, where
a loss that needs every log-prob first computes the logits twice.

N tokens, D hidden size, V vocabulary, F = N V D; P prompts with K responses each: a pair in the paper, where K is 2.
Sequence K p + k is response k of prompt p.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastp3o_kernels.checks import bounds_of_prompts, offsets_tensor
from fastp3o_kernels.dispatch import use_triton
from fastp3o_kernels.first_derivatives import first_derivatives_only
from fastp3o_kernels.head import eager as eager_head
from fastp3o_kernels.head.backward import HeadGradients
from fastp3o_kernels.head.chunks import plan_chunks
from fastp3o_kernels.head.dtypes import HeadDtypes
from fastp3o_kernels.head.forward import ChunkedHead
from fastp3o_kernels.head.fp16_scale import fp16_scale
from fastp3o_kernels.head.head import Head, check_head, save_for_backward, saved_tensors
from fastp3o_kernels.p3o import eager
from fastp3o_kernels.p3o.coefficients import loss_and_coefficients, on_policy_loss_and_coefficients
from fastp3o_kernels.p3o.output import P3OLossOutput, forward_results, loss_output
from fastp3o_kernels.p3o.pairs import PairInputs
from fastp3o_kernels.p3o.settings import DEFAULTS, P3OSettings
from fastp3o_kernels.rows.labels import NO_LABEL
from fastp3o_kernels.uncompiled import uncompiled


class LinearP3OLoss(torch.autograd.Function):
    """Forward 2 F operations, and 2 F for each gradient; backward multiplies them by the incoming gradient.

    weight, bias: the head's own, which autograd sees only as arguments.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, head, pairs, settings, plan, triton):
        needs = ctx.needs_input_grad[:3]
        chunked = ChunkedHead(labels, NO_LABEL, plan, triton=triton)
        with chunked.holding(hidden, head):
            gradients = HeadGradients(chunked, hidden, head, needs) if any(needs) else None
            scale = fp16_scale(gradients, plan.dtypes.multiplied, hidden.device)
            for chunk in plan.chunks:
                for span in chunk.spans:
                    chunked.forward(span)
                if gradients is None:
                    continue
                own = pairs.part(chunk.units)
                results, coefficients = loss_and_coefficients(chunked.logprobs, own, settings, triton=triton)
                if scale is not None and chunk.spans:
                    tokens = slice(chunk.spans[0].start, chunk.spans[-1].stop)
                    coefficients[tokens] *= scale.lowered_for(coefficients[tokens])
                # The last span's logits are still in their buffer.
                for span in reversed(chunk.spans):
                    gradients.backward(span, coefficients[span])
            if gradients is None or len(plan.chunks) > 1:
                results, _ = loss_and_coefficients(chunked.logprobs, pairs, settings, triton=triton)
            if gradients is not None:
                gradients.finish()
        ctx.gradients, ctx.scale = gradients, None if scale is None else scale.value
        return forward_results(ctx, results)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad_loss, _):
        if ctx.gradients is None:
            raise RuntimeError("the gradients were handed out by the first backward pass; call the loss again")
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.results(grad_loss if ctx.scale is None else grad_loss / ctx.scale), *[None] * 6


class OnPolicyLinearP3OLoss(torch.autograd.Function):
    """The loss needs no logits; backward computes them once, for tokens with a coefficient alone: at most 6 F.

    weight, bias: the head's own, which autograd sees only as arguments.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, head, pairs, settings, plan, triton):
        given = pairs, len(hidden), plan.dtypes.logits, settings
        results, coefficients = on_policy_loss_and_coefficients(*given, triton=triton)
        save_for_backward(ctx, hidden, head, labels, coefficients)
        ctx.plan, ctx.triton = plan, triton
        return forward_results(ctx, results)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad_loss, _):
        all_hidden, head, labels, coefficients = saved_tensors(ctx)
        tokens = coefficients.nonzero().squeeze(1)
        everything = len(tokens) == len(all_hidden)
        hidden = all_hidden if everything else all_hidden[tokens]
        if not everything:
            labels, coefficients = labels[tokens], coefficients[tokens]
        coefficients = coefficients * grad_loss
        chunked = ChunkedHead(labels, NO_LABEL, ctx.plan, triton=ctx.triton)
        with chunked.holding(hidden, head):
            gradients = HeadGradients(chunked, hidden, head, ctx.needs_input_grad[:3])
            scale = fp16_scale(gradients, ctx.plan.dtypes.multiplied, hidden.device)
            if scale is not None:
                coefficients = coefficients * scale.lowered_for(coefficients)
            most = ctx.plan.logits_rows
            for begin in range(0, len(hidden), most):
                span = slice(begin, min(begin + most, len(hidden)))
                gradients.on_policy(span, coefficients[span])
            dhidden, dweight, dbias = gradients.results(None if scale is None else 1 / scale.value)
        if dhidden is not None and not everything:
            dhidden = torch.zeros_like(all_hidden).index_copy_(0, tokens, dhidden)
        return dhidden, dweight, dbias, *[None] * 6


@uncompiled
def linear_p3o_loss(
    hidden: Tensor,
    head: Head | Tensor,
    labels: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    rewards: Tensor,
    settings: P3OSettings = DEFAULTS,
    *,
    old_token_logprobs: Tensor | None = None,
    valid_responses: Tensor | None = None,
    divisor: float | Tensor | None = None,
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
        hidden: [N, D], the hidden states that predict the response tokens.
        head: Head with a weight [V, D], or the bare weight, as in `linear_logprobs`.
        labels: [N] int64 or int32, the response tokens, end-of-sequence included.
        cu_seqlens: [P K + 1] int32 or int64 on any device, or a list: where each response begins in [N]. It is needed
            on the host: a list or a tensor on the CPU spares waiting for the device. An empty response takes part in no
            pair.
        old_logprobs, ref_logprobs, rewards: [P, K].
        settings, valid_responses: as in `p3o_loss`. Tokens of responses that are not valid have no gradient but take
            part in the logits' product, which empty responses do not.
        old_token_logprobs: [N], for clipping="token" and only there, as in `token_p3o_loss`.
        divisor: of the sum over prompts, or tokens with clipping="token", as in `token_p3o_loss`.
        on_policy: old_logprobs are this very policy's (the first step after a rollout). Ratios are then 1 by
            definition; loss and metrics follow from old_logprobs without computing logits, and the backward pass
            computes logits and gradients in one go, none of it for tokens without a coefficient.
        memory_budget: bytes of scratch for logits and their gradient, as in `linear_logprobs`. Responses to a prompt
            whose logits it does not hold are computed in two passes: what fits is kept, the rest computed twice, with
            the same result.
        impl: None, "triton" or "eager", as in `linear_logprobs`.

    Returns:
        P3OLossOutput; the gradient reaches hidden states, weight and bias.

    Raises:
        ValueError: as in `linear_logprobs` and `p3o_loss`.
        RuntimeError: for a second backward pass.
    """
    head, cu_seqlens = Head.from_weight(head), offsets_tensor(cu_seqlens)
    check_head(hidden, head, labels, ignore_index=None)
    pairs = PairInputs.checked(
        "hidden",
        hidden,
        cu_seqlens,
        old_logprobs,
        ref_logprobs,
        rewards,
        settings,
        valid_responses=valid_responses,
        old_token_logprobs=old_token_logprobs,
        divisor=divisor,
        on_policy=on_policy,
    )
    triton = use_triton(impl, hidden, head.weight, head.bias, *pairs.floating.values())
    dtypes = HeadDtypes.for_hidden(hidden)
    if impl == "eager" or len(hidden) == 0:
        logprobs = eager_head.linear_logprobs(hidden, head, labels, NO_LABEL, dtypes.rounded)
        return eager.token_loss(logprobs, pairs, settings, on_policy=on_policy)
    if not torch.is_grad_enabled():
        hidden, head = hidden.detach(), head.detach()
    bounds = bounds_of_prompts(cu_seqlens, len(hidden), pairs.responses_per_prompt)
    plan = plan_chunks(bounds, len(head.weight), dtypes, memory_budget)
    function = OnPolicyLinearP3OLoss if on_policy else LinearP3OLoss
    tensors = hidden, head.weight, head.bias, labels.contiguous()
    return loss_output(*function.apply(*tensors, head, pairs, settings, plan, triton))
