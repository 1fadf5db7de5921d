"""P3O's loss from log-probabilities of responses or of their tokens, or from logits.

N tokens, V vocabulary, P prompts with K responses each: sequence K p + k is response k of prompt p.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastp3o_kernels.checks import check_floating, check_shape, check_tensors
from fastp3o_kernels.operation import HAS_TRITON, first_derivatives_only, graph_break, use_triton
from fastp3o_kernels.p3o import eager
from fastp3o_kernels.p3o.pairs import Pairs, check_reference_and_rewards
from fastp3o_kernels.p3o.settings import (
    DEFAULTS,
    METRICS,
    SAMPLER_METRICS,
    P3OLossOutput,
    P3OSettings,
    check_settings,
    hints_at_settings,
)
from fastp3o_kernels.rows.logprobs import token_logprobs as label_logprobs
from fastp3o_kernels.rows.rows import NO_LABEL

if HAS_TRITON:
    from fastp3o_kernels.p3o.pair_kernel import (
        RESULTS,
        empty_terms,
        launch_coefficients,
        launch_results,
    )


# --- from token log-probs, with autograd ----------------------------------------------------------


class TokenP3OLoss(torch.autograd.Function):
    """Two launches forward, which compute the gradient too. Returns the loss, and RESULTS without a
    gradient.
    """

    @staticmethod
    def forward(ctx, token_logprobs, pairs, settings):
        terms = empty_terms(pairs)
        ctx.save_for_backward(launch_coefficients(token_logprobs, pairs, settings, terms))
        results = launch_results(terms, pairs, settings)
        ctx.mark_non_differentiable(results)
        return results[0].clone(), results

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad_loss, _):
        (coefficients,) = ctx.saved_tensors
        return coefficients * grad_loss, None, None


def loss_output(loss: Tensor, results: Tensor) -> P3OLossOutput:
    """Joins a differentiable loss and what the kernels found: RESULTS, [13], or [11] without
    importance weights.
    """
    values = dict(zip(RESULTS, results.unbind(), strict=False))
    averaged = {
        name: count for name, count in (METRICS | SAMPLER_METRICS).items() if name in values
    }
    counts = {name: values[count] for name, count in averaged.items() if count is not None}
    return P3OLossOutput(loss, {name: values[name] for name in averaged}, counts)


# --- public functions -----------------------------------------------------------------------------


@graph_break
@hints_at_settings
def token_p3o_loss(
    token_logprobs: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor,
    rewards: Tensor,
    settings: P3OSettings = DEFAULTS,
    *,
    old_token_logprobs: Tensor | None = None,
    valid_responses: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    divisor: float | Tensor | None = None,
    impl: str | None = None,
) -> P3OLossOutput:
    """P3O's loss from the log-probabilities of tokens, for your own head.

    Args:
        token_logprobs: [N] log π of every response token, the end-of-sequence included.
        cu_seqlens: [P K + 1] int32 or int64 on any device, or a list: where each response begins.
            An empty response takes part in no pair.
        old_logprobs, ref_logprobs, rewards, settings, valid_responses, sampler_logprobs: as in
            `p3o_loss`.
        old_token_logprobs: [N] log π_old of the same tokens, for clipping="token" and only there:
            the first author's variant, which clips every token's log-probability at the old one ± ε
            and averages over tokens. None where old_logprobs is None, too.
        divisor: as in `p3o_loss`; for clipping="token" the number of tokens, N by default.
        impl: None, "triton" or "eager", as in `token_logprobs`.

    Returns:
        P3OLossOutput; the gradient reaches token_logprobs.

    Raises:
        ValueError: as in `p3o_loss` and `sequence_logprobs`.
    """
    check_tensors(token_logprobs=token_logprobs)
    if token_logprobs.dim() != 1:
        raise ValueError(f"token_logprobs must have shape [N], got {list(token_logprobs.shape)}")
    check_floating("token_logprobs", token_logprobs)
    pairs = Pairs(
        torch.as_tensor(cu_seqlens),
        old_logprobs,
        ref_logprobs,
        rewards,
        old_token_logprobs,
        valid_responses,
        sampler_logprobs,
        divisor,
    )
    pairs = pairs.checked("token_logprobs", token_logprobs, settings)
    if not use_triton(impl, token_logprobs, *pairs.floating.values()) or len(token_logprobs) == 0:
        return eager.token_loss(token_logprobs, pairs, settings)
    return loss_output(*TokenP3OLoss.apply(token_logprobs.float().contiguous(), pairs, settings))


@graph_break
@hints_at_settings
def logits_p3o_loss(
    logits: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor,
    rewards: Tensor,
    settings: P3OSettings = DEFAULTS,
    *,
    old_token_logprobs: Tensor | None = None,
    valid_responses: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    divisor: float | Tensor | None = None,
    temperature: float = 1.0,
    inplace_backward: bool = False,
    impl: str | None = None,
) -> P3OLossOutput:
    """P3O's loss from the logits that predict the tokens of the responses to P prompts.

    Args:
        logits: [N, V] of any floating dtype. P3O exponentiates sums of log-probabilities: logits
            rounded to bf16 move the log-ratio of a 128-token response by about 0.1, half a clip
            range. Compute them in fp32, or give hidden states to `linear_p3o_loss`.
        labels: [N] int64 or int32, the response tokens, end-of-sequence included.
        cu_seqlens, old_logprobs, ref_logprobs, rewards, settings, old_token_logprobs,
            valid_responses, sampler_logprobs, divisor: as in `token_p3o_loss`.
        temperature, inplace_backward, impl: as in `token_logprobs`.

    Returns:
        P3OLossOutput; the gradient reaches the logits. Rows without a gradient are not read in
            backward.

    Raises:
        ValueError: as in `token_logprobs`, `sequence_logprobs` and `p3o_loss`.
    """
    logprobs = label_logprobs(
        logits,
        labels,
        temperature=temperature,
        ignore_index=NO_LABEL,
        inplace_backward=inplace_backward,
        impl=impl,
    )
    return token_p3o_loss(
        logprobs,
        cu_seqlens,
        old_logprobs,
        ref_logprobs,
        rewards,
        settings,
        old_token_logprobs=old_token_logprobs,
        valid_responses=valid_responses,
        sampler_logprobs=sampler_logprobs,
        divisor=divisor,
        impl=impl,
    )


@graph_break
@hints_at_settings
def p3o_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor,
    rewards: Tensor,
    settings: P3OSettings = DEFAULTS,
    *,
    valid_responses: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    divisor: float | Tensor | None = None,
    impl: str | None = None,
) -> P3OLossOutput:
    """Pairwise Proximal Policy Optimization (arXiv 2310.00212) from log-probabilities of the
    responses to P prompts.

    With q = sg((r1 − r2) − β (u of the policy in the KL)), u = log π/π_ref(y1) − log π/π_ref(y2), ρ
    = π/π_old:
        joint (P3O-V2): mean of max(−q c u, −q c clip(u, u_old ± ε)) / 2, c = sg(clip(ρ1 ρ2, 1/C,
            C));
        separate (P3O-V1): mean of [max(−q c2 ρ1, −q c2 clip(ρ1, 1 ± ε)) + max(q c1 ρ2, q c1
            clip(ρ2, 1 ± ε))] / 2;
        none: the joint loss without its clipped branch.
    ε, C and β are the settings' clip_range, ratio_cap and kl_coef; kl_reward is the policy in the
    KL part of q. The mean is over all pairs of responses to the same prompt: one in the paper, K (K
    − 1) / 2 for K responses (beyond it). Adding any number to all rewards of a prompt changes
    nothing.

    Args:
        logprobs: [P, K] log π(y|x), differentiable; column 0 is response 1. Sums over response
            tokens, in nats. K is 2 or more.
        old_logprobs: [P, K] of the policy that sampled, as this model computes them. None: they are
            this policy's own, as at the first step after a rollout; every ratio is exactly 1.
        ref_logprobs: [P, K] of the frozen reference.
        rewards: [P, K]; or [P, K, K], which has what stands for r_i − r_j in each pair i < j where
            no scores give them, such as judged comparisons.
        settings: clipping is "joint", "separate" or "none"; for "token" see `token_p3o_loss`.
        valid_responses: [P, K] bool, False for responses that take part in no pair, such as
            truncated ones, which may have NaN elsewhere; None: all are valid. Their pairs count in
            the mean, as 0: every prompt weighs the same, whatever the batch. Where less than a pair
            is left, and where P is 0, the loss and its gradient are 0.
        sampler_logprobs: [P, K] log μ(y|x) by what sampled the responses, where that is not the old
            policy itself: another engine or precision, or older weights. Each pair's loss is then
            multiplied by the constant min(π_old(y1) π_old(y2) / (μ(y1) μ(y2)), C), C the settings'
            sampler_ratio_cap. Without the cap the mean over μ's pairs would be that over the old
            policy's own: E_π_old[f(y1, y2)] is the mean over μ of f times that product. The cap
            bounds its variance (truncated importance sampling, Ionides 2008; Yao et al. 2025, "Your
            Efficient RL Framework Secretly Brings You Off-Policy RL Training"). Whole pairs are
            weighed with clipping="token", too, whose c is the ratio of a whole pair. None: no
            weights.
        divisor: of the sum over prompts of the mean over their pairs, P by default: a number above
            0 or a 0-d tensor. For accumulation and uneven processes: the number of prompts in the
            whole batch (over that of processes, where their gradients are averaged), so that losses
            of parts add up to the loss of the whole.
        impl: None, "triton" or "eager", as in `token_logprobs`.

    Returns:
        P3OLossOutput(loss, metrics), fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: for shapes, dtypes or devices that are wrong; for NaN in ref_logprobs, NaN or an
            infinity in old_logprobs, rewards or sampler_logprobs, old or reference ones above 0,
            and differences of pairs that are not −1 times the opposite ones or 0 in their place
            (values on a GPU are looked at only with FASTP3O_DEBUG=1).
    """
    check_settings(settings)
    check_reference_and_rewards(ref_logprobs, rewards)
    check_tensors(logprobs=logprobs, rewards=rewards)
    if settings.clipping == "token":
        raise ValueError('clipping="token" clips tokens; call token_p3o_loss or logits_p3o_loss')
    if logprobs.dim() != 2 or logprobs.shape[1] < 2:
        raise ValueError(
            f"logprobs must have shape [P, K] with K of at least 2, got {list(logprobs.shape)}"
        )
    check_floating("logprobs", logprobs)
    shape = tuple(logprobs.shape)
    check_shape(
        "rewards", rewards, shape + shape[1:] if rewards.dim() == 3 else shape, "as logprobs"
    )
    # A response whose sum is known is a response of one token.
    one_token_each = torch.arange(logprobs.numel() + 1, dtype=torch.int32, device=logprobs.device)
    return token_p3o_loss(
        logprobs.flatten(),
        one_token_each,
        old_logprobs,
        ref_logprobs,
        rewards,
        settings,
        valid_responses=valid_responses,
        sampler_logprobs=sampler_logprobs,
        divisor=divisor,
        impl=impl,
    )
