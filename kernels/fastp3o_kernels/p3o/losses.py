"""P3O's loss from log-probabilities of responses or of their tokens.

N tokens, P prompts with K responses each: sequence K p + k is response k of prompt p.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastp3o_kernels.checks import check_floating, check_shape
from fastp3o_kernels.dispatch import use_triton
from fastp3o_kernels.first_derivatives import first_derivatives_only
from fastp3o_kernels.p3o import eager
from fastp3o_kernels.p3o.coefficients import loss_and_coefficients
from fastp3o_kernels.p3o.output import P3OLossOutput, forward_results, loss_output
from fastp3o_kernels.p3o.pairs import PairInputs
from fastp3o_kernels.p3o.settings import DEFAULTS, P3OSettings
from fastp3o_kernels.uncompiled import uncompiled


class TokenP3OLoss(torch.autograd.Function):
    """One launch forward, which computes the gradient too."""

    @staticmethod
    def forward(ctx, token_logprobs, pairs, settings):
        results, coefficients = loss_and_coefficients(token_logprobs, pairs, settings, triton=True)
        ctx.save_for_backward(coefficients)
        return forward_results(ctx, results)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad_loss, _):
        (coefficients,) = ctx.saved_tensors
        return coefficients * grad_loss, None, None


@uncompiled
def token_p3o_loss(
    token_logprobs: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    rewards: Tensor,
    settings: P3OSettings = DEFAULTS,
    *,
    old_token_logprobs: Tensor | None = None,
    valid_responses: Tensor | None = None,
    divisor: float | Tensor | None = None,
    impl: str | None = None,
) -> P3OLossOutput:
    """P3O's loss from the log-probabilities of tokens, for a head of one's own.

    Args:
        token_logprobs: [N] log π of every response token, the end-of-sequence included.
        cu_seqlens: [P K + 1] int32 or int64 on any device, or a list: where each response begins. An empty response
            takes part in no pair.
        old_logprobs, ref_logprobs, rewards, settings, valid_responses: as in `p3o_loss`.
        old_token_logprobs: [N] log π_old of the same tokens, for clipping="token" and only there: the first author's
            variant, which clips every token's log-probability at the old one ± ε and averages over tokens.
        divisor: as in `p3o_loss`; for clipping="token" the number of tokens, N by default.
        impl: None, "triton" or "eager", as in `token_logprobs`.

    Returns:
        P3OLossOutput; the gradient reaches token_logprobs.

    Raises:
        ValueError: as in `p3o_loss` and `sequence_logprobs`.
    """
    if token_logprobs.dim() != 1:
        raise ValueError(f"token_logprobs must have shape [N], got {list(token_logprobs.shape)}")
    check_floating("token_logprobs", token_logprobs)
    pairs = PairInputs.checked(
        "token_logprobs",
        token_logprobs,
        cu_seqlens,
        old_logprobs,
        ref_logprobs,
        rewards,
        settings,
        valid_responses=valid_responses,
        old_token_logprobs=old_token_logprobs,
        divisor=divisor,
    )
    if not use_triton(impl, token_logprobs, *pairs.floating.values()) or len(token_logprobs) == 0:
        return eager.token_loss(token_logprobs, pairs, settings)
    return loss_output(*TokenP3OLoss.apply(token_logprobs.float().contiguous(), pairs, settings))


@uncompiled
def p3o_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    rewards: Tensor,
    settings: P3OSettings = DEFAULTS,
    *,
    valid_responses: Tensor | None = None,
    divisor: float | Tensor | None = None,
    impl: str | None = None,
) -> P3OLossOutput:
    """Pairwise Proximal Policy Optimization (arXiv 2310.00212) from log-probabilities of the responses to P prompts.

    With q = sg((r1 − r2) − β (u of the policy in the KL)), u = log π/π_ref(y1) − log π/π_ref(y2), ρ = π/π_old:
        joint (P3O-V2): mean of max(−q c u, −q c clip(u, u_old ± ε)) / 2, c = sg(clip(ρ1 ρ2, 1/C, C));
        separate (P3O-V1): mean of [max(−q c2 ρ1, −q c2 clip(ρ1, 1 ± ε)) + max(q c1 ρ2, q c1 clip(ρ2, 1 ± ε))] / 2;
        none: the joint loss without its clipped branch.
    ε, C and β are the settings' clip_range, ratio_cap and kl_coef; kl_reward is the policy in the KL part of q.
    The mean is over all pairs of responses to the same prompt: one in the paper, K (K − 1) / 2 for K responses (beyond
    it). Adding any number to all rewards of a prompt changes nothing.

    Args:
        logprobs: [P, K] log π(y|x), differentiable; column 0 is response 1. Sums over response tokens, in nats. K is 2
            or more.
        old_logprobs: [P, K] of the policy that sampled, as this model computes them.
        ref_logprobs: [P, K] of the frozen reference.
        rewards: [P, K].
        settings: clipping is "joint", "separate" or "none"; for "token" see `token_p3o_loss`.
        valid_responses: [P, K] bool, False for responses that take part in no pair, such as truncated ones; None: all
            are valid. Nothing else is asked of the others, NaN is allowed there. Their pairs count in the mean, as 0:
            every prompt weighs the same, whatever the batch. Where less than a pair is left, and where P is 0, the loss
            and its gradient are 0.
        divisor: of the sum over prompts of the mean over their pairs, P by default: a number above 0 or a 0-d tensor.
            For accumulation and uneven processes: the number of prompts in the whole batch (over that of processes,
            where their gradients are averaged), so that losses of parts add up to the loss of the whole.
        impl: None, "triton" or "eager", as in `token_logprobs`.

    Returns:
        P3OLossOutput(loss, metrics), fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: for shapes, dtypes or devices that are wrong, and for NaN in old_logprobs, ref_logprobs or rewards
            (on a GPU only with FASTP3O_DEBUG=1).
    """
    if settings.clipping == "token":
        raise ValueError('clipping="token" clips tokens; call token_p3o_loss or logits_p3o_loss')
    if logprobs.dim() != 2 or logprobs.shape[1] < 2:
        raise ValueError(f"logprobs must have shape [P, K] with K of at least 2, got {list(logprobs.shape)}")
    check_floating("logprobs", logprobs)
    check_shape("old_logprobs", old_logprobs, tuple(logprobs.shape), "as logprobs")
    # A response whose sum is known is a response of one token.
    one_token_each = torch.arange(logprobs.numel() + 1, dtype=torch.int32, device=logprobs.device)
    given = logprobs.flatten(), one_token_each, old_logprobs, ref_logprobs, rewards, settings
    return token_p3o_loss(*given, valid_responses=valid_responses, divisor=divisor, impl=impl)
