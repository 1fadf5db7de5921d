"""All operations in plain PyTorch: the oracle of the tests, the CPU's path, the baseline of the benchmarks.

N tokens, V vocabulary, P prompts with K responses each, S sequences (S = P K; K p + k is response k of prompt p), Q
pairs of responses to the same prompt (Q = P K (K − 1) / 2).
fp64 inputs are computed in fp64; narrower ones in fp32.
"""

import torch
from torch import Tensor

from fastp3o_kernels.p3o.objective import LOG_RATIO_LIMIT, METRICS, Objective, P3OLossOutput


def at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def token_logprobs(logits: Tensor, labels: Tensor, *, temperature: float, ignore_index: int) -> Tensor:
    """logits [N, V], labels [N] -> [N]."""
    ignored = labels == ignore_index
    logits = at_least_fp32(logits)
    logprobs = (logits if temperature == 1 else logits / temperature).log_softmax(dim=-1)
    of_labels = logprobs.gather(1, labels.masked_fill(ignored, 0).long().unsqueeze(1)).squeeze(1)
    return of_labels.masked_fill(ignored, 0.0)


def linear_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, operands: torch.dtype
) -> Tensor:
    """hidden [N, D] and weight [V, D], rounded to `operands` -> logits [N, V], at least fp32."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = at_least_fp32(hidden.to(operands)) @ at_least_fp32(weight.to(operands)).T
        if bias is not None:
            logits = logits + bias
        return logits if softcap is None else softcap * (logits / softcap).tanh()


def sequence_logprobs(token_logprobs: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sums over each sequence, [N] -> [S], in fixed order."""
    lengths = cu_seqlens.long().diff()
    return torch.segment_reduce(at_least_fp32(token_logprobs), "sum", lengths=lengths, unsafe=True)


def p3o_loss(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, objective: Objective
) -> P3OLossOutput:
    """[P, K] each -> the mean over pairs of the joint, separate or unclipped loss (arXiv 2310.00212, P3O-V2 and V1)."""
    prompts = len(logprobs)
    logprobs, old_logprobs, ref_logprobs, rewards = (
        pairs_of(at_least_fp32(tensor)) for tensor in (logprobs, old_logprobs, ref_logprobs, rewards)
    )
    q = advantage_difference(logprobs, old_logprobs, ref_logprobs, rewards, objective)
    log_ratios = logprobs - old_logprobs
    epsilon = objective.clip_range

    if objective.clipping == "separate":
        ratios = exp_limited(log_ratios)
        weights = ratios.detach().clamp(1 / objective.ratio_cap, objective.ratio_cap).flip(1)
        signed_advantage = torch.stack([-q, q], dim=1) * weights
        clipped_ratios = ratios.clamp(1 - epsilon, 1 + epsilon)
        losses = torch.maximum(signed_advantage * ratios, signed_advantage * clipped_ratios)
        outside = clipped_ratios != ratios
        zero = (signed_advantage * clipped_ratios > signed_advantage * ratios) | (signed_advantage == 0)
        zero_pairs = zero.all(dim=1)
        loss = losses.sum(dim=1).mean() / 2
    else:
        weighted_advantage = -q * joint_weight(log_ratios, objective)
        difference = preference(logprobs, ref_logprobs)
        old_difference = preference(old_logprobs, ref_logprobs)
        clipped_difference = torch.clamp(difference, old_difference - epsilon, old_difference + epsilon)
        unclipped_losses = weighted_advantage * difference
        outside = clipped_difference != difference
        zero_pairs = weighted_advantage == 0
        if objective.clipping == "joint":
            clipped_losses = weighted_advantage * clipped_difference
            zero_pairs = zero_pairs | (clipped_losses > unclipped_losses)
            loss = torch.maximum(unclipped_losses, clipped_losses).mean() / 2
        else:
            loss = unclipped_losses.mean() / 2
    zero_prompts = zero_pairs.view(prompts, -1).all(dim=1)
    return P3OLossOutput(loss, metrics_of(q, logprobs, log_ratios, ref_logprobs, outside, zero_prompts))


def pairs_of(of_responses: Tensor) -> Tensor:
    """[P, K] -> [Q, 2], all pairs of responses to each prompt."""
    first, second = torch.triu_indices(*2 * of_responses.shape[1:], offset=1)
    return torch.stack([of_responses[:, first], of_responses[:, second]], dim=2).flatten(0, 1)


def token_loss(
    token_logprobs: Tensor,
    cu_seqlens: Tensor,
    old_token_logprobs: Tensor | None,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    rewards: Tensor,
    objective: Objective,
) -> P3OLossOutput:
    """The loss from log-probs of tokens [N], in any clipping mode."""
    if objective.clipping == "token":
        return token_clipped_loss(
            token_logprobs, cu_seqlens, old_token_logprobs, old_logprobs, ref_logprobs, rewards, objective
        )
    logprobs = sequence_logprobs(token_logprobs, cu_seqlens).view(rewards.shape)
    return p3o_loss(logprobs, old_logprobs, ref_logprobs, rewards, objective)


def with_values(token_logprobs: Tensor, values: Tensor) -> Tensor:
    """`values`, with the gradient of token_logprobs."""
    return values + (token_logprobs - token_logprobs.detach())


def token_clipped_loss(
    token_logprobs: Tensor,
    cu_seqlens: Tensor,
    old_token_logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    rewards: Tensor,
    objective: Objective,
) -> P3OLossOutput:
    """The first author's later variant: every token is clipped for itself in each pair of its response; the mean is
    over these N (K − 1) cases.
    """
    token_logprobs, old_token_logprobs = at_least_fp32(token_logprobs), at_least_fp32(old_token_logprobs)
    P, K = rewards.shape
    of_responses = sequence_logprobs(token_logprobs, cu_seqlens).view(P, K)
    logprobs, old_logprobs, ref_logprobs, rewards = (
        pairs_of(at_least_fp32(tensor)) for tensor in (of_responses, old_logprobs, ref_logprobs, rewards)
    )
    q = advantage_difference(logprobs, old_logprobs, ref_logprobs, rewards, objective)
    log_ratios = logprobs - old_logprobs
    weighted_advantage = (-q * joint_weight(log_ratios, objective)).view(P, -1)

    # Of response i in its pair with j, [P, i, j].
    first, second = torch.triu_indices(K, K, offset=1)
    weights = weighted_advantage.new_zeros(P, K, K)
    weights[:, first, second], weights[:, second, first] = weighted_advantage, -weighted_advantage
    lengths = cu_seqlens.long().diff()
    plus, minus = (
        part.sum(dim=2).flatten().repeat_interleave(lengths, output_size=len(token_logprobs))
        for part in (weights.clamp(min=0), weights.clamp(max=0))
    )
    clipped = torch.clamp(
        token_logprobs, old_token_logprobs - objective.clip_range, old_token_logprobs + objective.clip_range
    )
    # max(w logprob, w clipped) is the larger of the two where w is positive, the smaller where it is negative.
    losses = plus * torch.maximum(token_logprobs, clipped) + minus * torch.minimum(token_logprobs, clipped)
    loss = losses.sum() / (len(token_logprobs) * (K - 1))

    gradient = torch.where(token_logprobs > clipped, plus, torch.where(token_logprobs < clipped, minus, plus + minus))
    has_gradient = sequence_logprobs((gradient != 0).to(logprobs.dtype), cu_seqlens).view(P, K).sum(dim=1) > 0
    metrics = metrics_of(q, logprobs, log_ratios, ref_logprobs, clipped != token_logprobs, ~has_gradient)
    return P3OLossOutput(loss, metrics)


def advantage_difference(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, objective: Objective
) -> Tensor:
    """q = sg((r1 − r2) − β ((log π/π_ref)(y1) − (log π/π_ref)(y2))), [Q]; π is the current or the rollout policy."""
    policy = logprobs if objective.kl_reward == "current" else old_logprobs
    return (rewards[:, 0] - rewards[:, 1] - objective.kl_coef * preference(policy, ref_logprobs)).detach()


def preference(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """How much more than the reference a policy prefers y1 to y2, [Q]: u of the joint loss."""
    log_ratios = logprobs - ref_logprobs
    return log_ratios[:, 0] - log_ratios[:, 1]


def joint_weight(log_ratios: Tensor, objective: Objective) -> Tensor:
    """c = sg(clip(ρ1 ρ2, 1/C, C)), [Q]."""
    return exp_limited(log_ratios.sum(dim=1)).clamp(1 / objective.ratio_cap, objective.ratio_cap).detach()


def exp_limited(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def metrics_of(
    q: Tensor, logprobs: Tensor, log_ratios: Tensor, ref_logprobs: Tensor, outside: Tensor, zero_prompts: Tensor
) -> dict[str, Tensor]:
    ratios = exp_limited(log_ratios)
    values = (
        ratios.mean(),
        ratios.max(),
        outside.float().mean(),
        q.abs().mean(),
        zero_prompts.float().mean(),
        (logprobs - ref_logprobs).mean(),
    )
    return {name: value.detach().float() for name, value in zip(METRICS, values, strict=True)}
