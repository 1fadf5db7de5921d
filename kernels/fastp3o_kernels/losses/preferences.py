"""Losses of a chosen and a rejected response, and of single responses that are desirable or not (KTO).

Pairs are [P, 2]: column 0 is the chosen response. ℓ = log π/π_ref of a response; Δ is the chosen response's ℓ less the
rejected one's. P pairs give P losses.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def log_ratio_difference(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Δ, [P, 2] -> [P]."""
    log_ratios = logprobs - ref_logprobs.detach()
    return log_ratios[:, 0] - log_ratios[:, 1]


def dpo(logprobs: Tensor, ref_logprobs: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Direct preference optimization (arXiv 2305.18290, equation 7): −log σ(β Δ), [P, 2] -> [P].

    The gradient is β (σ(β Δ) − 1) (∇ log π_chosen − ∇ log π_rejected). A larger β allows less deviation from the
    reference. label_smoothing: the probability that a label is wrong (conservative DPO, Mitchell 2023).
    """
    difference = beta * log_ratio_difference(logprobs, ref_logprobs)
    loss = -(1 - label_smoothing) * logsigmoid(difference)
    return loss - label_smoothing * logsigmoid(-difference) if label_smoothing else loss


def bpo(logprobs: Tensor, behavior_logprobs: Tensor, *, beta: float = 0.1) -> Tensor:
    """Behaviour preference optimization (arXiv 2406.12168): DPO whose reference is the policy that sampled the pairs,
    refreshed every few updates, [P, 2] -> [P].
    """
    return dpo(logprobs, behavior_logprobs, beta=beta)


def ipo(logprobs: Tensor, ref_logprobs: Tensor, *, tau: float = 0.1) -> Tensor:
    """Identity preference optimization (arXiv 2310.12036, equation 17): (Δ − 1 / (2 τ))², [P, 2] -> [P].

    The paper's log-probs are sums over a response. Means over its tokens, which its authors advise and TRL takes, are
    passed in the same way. IPO-MD is this loss of pairs from the mixture of policy and reference (see `nash_md`).
    """
    return (log_ratio_difference(logprobs, ref_logprobs) - 1 / (2 * tau)).square()


def simpo(mean_logprobs: Tensor, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """Simple preference optimization, without a reference (arXiv 2405.14734, equation 6), [P, 2] -> [P].

    −log σ(β (mean log π_chosen − mean log π_rejected) − γ). mean_logprobs: means over the tokens of each response.
    gamma: the target margin.
    """
    return -logsigmoid(beta * (mean_logprobs[:, 0] - mean_logprobs[:, 1]) - gamma)


def orpo(mean_logprobs: Tensor, *, weight: float = 0.1) -> Tensor:
    """Odds ratio preference optimization, without a reference (arXiv 2403.07691, equation 6), [P, 2] -> [P].

    −mean log π_chosen − λ log σ(log odds_chosen − log odds_rejected). mean_logprobs: means over the tokens of each
    response. The p of a response's odds p / (1 − p) is the geometric mean of its tokens' probabilities. weight: λ.
    """
    log_odds = mean_logprobs - log1mexp(mean_logprobs)
    return -mean_logprobs[:, 0] - weight * logsigmoid(log_odds[:, 0] - log_odds[:, 1])


def log1mexp(logprobs: Tensor) -> Tensor:
    """log(1 − e^x), x < 0, in two forms, each used where it loses no digits (Mächler, "Accurately computing
    log(1 − exp(−|a|))", 2012). A probability that rounds to 1 counts as the largest below 1.
    """
    logprobs = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    near = logprobs > -math.log(2)
    # Each form gets a harmless value where the other is taken, or its gradient there would be NaN.
    by_expm1 = (-torch.expm1(logprobs.where(near, -1.0))).log()
    by_log1p = torch.log1p(-logprobs.where(~near, -1.0).exp())
    return torch.where(near, by_expm1, by_log1p)


def cpo(logprobs: Tensor, *, beta: float = 0.1, weight: float = 1.0) -> Tensor:
    """Contrastive preference optimization, without a reference (arXiv 2401.08417, equations 3 and 4), [P, 2] -> [P].

    −log σ(β (log π_chosen − log π_rejected)) − λ log π_chosen. weight: λ, 1 in the paper.
    """
    return -logsigmoid(beta * (logprobs[:, 0] - logprobs[:, 1])) - weight * logprobs[:, 0]


def slic(logprobs: Tensor, target_logprobs: Tensor | None = None, *, delta: float = 1.0, weight: float = 1.0) -> Tensor:
    """Sequence likelihood calibration (SLiC-HF, arXiv 2305.10425, equation 1), [P, 2] -> [P].

    max(0, δ − log π_chosen + log π_rejected) − λ log π(y_target). target_logprobs: [P], log π of texts that keep the
    policy near the SFT data, differentiable; by default the chosen responses, which the paper also proposes.
    """
    target = logprobs[:, 0] if target_logprobs is None else target_logprobs
    return (delta - logprobs[:, 0] + logprobs[:, 1]).clamp(min=0) - weight * target


def apo_zero(logprobs: Tensor, ref_logprobs: Tensor, *, beta: float = 0.1) -> Tensor:
    """Anchored preference optimization (arXiv 2408.06266): (1 − σ(β ℓ_chosen)) + σ(β ℓ_rejected), [P, 2] -> [P].

    Chosen responses become likelier, rejected ones less likely. For data better than the policy's own.
    """
    chosen, rejected = (beta * (logprobs - ref_logprobs.detach())).unbind(1)
    return (-chosen).sigmoid() + rejected.sigmoid()


def apo_down(logprobs: Tensor, ref_logprobs: Tensor, *, beta: float = 0.1) -> Tensor:
    """Anchored preference optimization (arXiv 2408.06266): σ(β ℓ_chosen) + 1 − σ(β Δ), [P, 2] -> [P].

    Both become less likely, rejected responses more so. For data worse than the policy's own.
    """
    chosen, rejected = (beta * (logprobs - ref_logprobs.detach())).unbind(1)
    return chosen.sigmoid() + (rejected - chosen).sigmoid()


def discopop(logprobs: Tensor, ref_logprobs: Tensor, *, beta: float = 0.05, tau: float = 0.05) -> Tensor:
    """Discovered preference optimization, the log-ratio modulated loss (arXiv 2406.08414, equation 5), [P, 2] -> [P].

    (1 − m) (−log σ(β Δ)) + m e^(−β Δ), m = σ(β Δ / τ). Not convex: for Δ slightly below 0 the blend has a bump.
    """
    difference = beta * log_ratio_difference(logprobs, ref_logprobs)
    # m e^(−β Δ) in one exponential: far below 0 one factor is 0 and the other infinite.
    exponential = torch.exp(logsigmoid(difference / tau) - difference)
    return (-difference / tau).sigmoid() * -logsigmoid(difference) + exponential


def kto(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    reference_point: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimization (arXiv 2402.01306, equation 8) of single responses; any shape.

    λ_D (1 − σ(β (ℓ − z0))) for a desirable response, λ_U (1 − σ(β (z0 − ℓ))) for another one. desirable: bool, of the
    same shape. reference_point: z0 of `kto_reference_point`, 0-d.
    """
    log_ratios = logprobs - ref_logprobs.detach()
    distance = beta * (log_ratios - reference_point)
    return (desirable_weight * (-distance).sigmoid()).where(desirable, undesirable_weight * distance.sigmoid())


def kto_reference_point(mismatched_logprobs: Tensor, mismatched_ref_logprobs: Tensor) -> Tensor:
    """z0: the mean of ℓ over prompts with another prompt's response, at least 0; 0-d, detached.

    It is a mean over the whole batch: with several processes or accumulation, average before cutting off at 0.
    """
    return (mismatched_logprobs - mismatched_ref_logprobs).detach().mean().clamp(min=0)
