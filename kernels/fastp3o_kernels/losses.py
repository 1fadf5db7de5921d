"""Losses as functions of log-probabilities, for `linear_loss`, `linear_logprobs` or your own head.

They return the loss of each pair, response or token, to be summed by an objective of `linear_loss`
or averaged. Only the policy's log-probs get gradients: old and reference log-probs, rewards and
advantages are constants everywhere. P3O's losses, which have kernels of their own, are in
`fastp3o_kernels.p3o`.

P prompts with K responses each, n tokens. ρ = π / π_old, A the advantage, r the reward.

No finite log-prob gives NaN: what is exponentiated is `bounded`.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fastp3o_kernels.checks import check_floating, check_tensors
from fastp3o_kernels.p3o.settings import truncated_ratios

__all__ = [
    "apo_down",
    "apo_zero",
    "bounded",
    "bounded_exp",
    "cispo",
    "copg",
    "cpo",
    "discopop",
    "dpo",
    "excess",
    "group_advantages",
    "ipo",
    "k1",
    "k2",
    "k3",
    "kto",
    "kto_reference_point",
    "log_ratio_difference",
    "nash_md",
    "oapl",
    "orpo",
    "overlong_penalty",
    "ppo_clip",
    "ppo_penalty",
    "rebel",
    "reinforce",
    "rloo_advantages",
    "sapo",
    "simpo",
    "slic",
    "step_kl",
    "truncated_ratios",
    "vespo_weights",
]

# --- Exponentials ---------------------------------------------------------------------------------


class Bounded(torch.autograd.Function):
    """min(x, bound) with the gradient of x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, bound):
        return x.clamp(max=bound)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def bounded(log_ratios: Tensor) -> Tensor:
    """Log-ratios that can be exponentiated; any shape.

    They are at most 0.9 times the exponent of the largest number of their dtype: 79.8 in fp32 and
    bf16, 638 in fp64. So e^x is finite, also times an advantage, and 0 times it is 0: what is
    clipped, masked or has an advantage of 0 has a gradient of 0, where ∞ · 0 would be NaN. Beyond
    the bound e^x has the value and the gradient of the bound. The loss that this replaces is
    infinite, and so is its gradient, of the same sign.
    """
    return Bounded.apply(log_ratios, 0.9 * math.log(torch.finfo(log_ratios.dtype).max))


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """e^x of `bounded` log-ratios, such as the ratio ρ = π / π_old; any shape."""
    return bounded(log_ratios).exp()


def excess(log_ratios: Tensor) -> Tensor:
    """e^x − 1 − x of `bounded` log-ratios, never negative; any shape."""
    log_ratios = bounded(log_ratios)
    return torch.expm1(log_ratios) - log_ratios


# --- Estimators of the KL -------------------------------------------------------------------------
# Estimators of KL(π ‖ π_ref) from samples of π, tokens or responses (Schulman, "Approximating KL
# divergence", 2020). q = π_ref / π at a sample. A loss follows an estimator's gradient with the
# samples held fixed, which is not that of the estimated KL (arXiv 2506.09477): each docstring says
# which gradient it is on-policy. Off-policy, each must be multiplied by the ratio π / π_old.


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log π − log π_ref: unbiased, of either sign. As a loss it is useless: the mean of its
    gradient, that of log π, is
    0. In a reward, detached, it is the usual choice.
    """
    return logprobs - ref_logprobs.detach()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log q)² / 2: biased, never negative. Its gradient is that of KL(π ‖ π_ref)."""
    return k1(logprobs, ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q − 1 − log q: unbiased, never negative; GRPO's. Its gradient, (1 − q) ∇ log π, is that of
    KL(π_ref ‖ π).
    """
    return excess(ref_logprobs.detach() - logprobs)


# --- Policy gradients: losses of responses or tokens with advantages ------------------------------

# Added to the standard deviation, as DeepSeek's successors and TRL do.
SMALL = 1e-4


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """−A log π of each response or token (Williams 1992), A = r − b for any baseline b that it does
    not depend on.

    On-policy: the policy that is differentiated has sampled. Any shape. With A = r − mean r over a
    prompt's K responses the sum over these, divided by K − 1, is the pairwise policy gradient (PPG,
    arXiv 2310.00212, equation 6): the mean over pairs of −(r1 − r2) / 2 (log π(y1) − log π(y2)), a
    K-th of the sum that RLOO takes.
    """
    return -advantages.detach() * logprobs


def check_groups(rewards: Tensor) -> None:
    check_tensors(rewards=rewards)
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(
            "rewards must have shape [P, K] with K of at least 2: a response is compared with the "
            f"others to its prompt, got {list(rewards.shape)}"
        )
    check_floating("rewards", rewards)


def rloo_advantages(rewards: Tensor) -> Tensor:
    """r less the mean of the prompt's other K − 1 ≥ 1 rewards, [P, K] -> [P, K] (Kool et al. 2019;
    2402.14740).

    Raises ValueError as `group_advantages` does.
    """
    check_groups(rewards)
    K = rewards.shape[1]
    return (rewards - rewards.mean(1, keepdim=True)) * (K / (K - 1))


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
) -> Tensor:
    """PPO's clipped ratio of each token or response (arXiv 1707.06347): max(−A ρ, −A clip(ρ, 1 −
    ε_low, 1 + ε_high)).

    Any shape. clip_high: clip_low by default; a larger one is "clip-higher". The methods below have
    this loss and differ in advantages, bounds and in what the sum is divided by:

        GRPO      2402.03300  of tokens; group_advantages; + 0.04 k3; the mean over a response's, then over responses
        Dr. GRPO  2503.20783  of tokens; group_advantages(scale=False); the sum divided by the longest response's length
        DAPO      2503.14476  of tokens; clip_high 0.28; the mean over all tokens; groups of equal rewards sampled again
        GRPO+     DeepCoder   DAPO, with 0 for the tokens of responses that were cut off; no entropy bonus
        GSPO      2507.18071  of responses, by the means of their tokens' log-probs; clip_low 3e-4, clip_high 4e-4
    """
    ratios = bounded_exp(logprobs - old_logprobs.detach())
    clipped = ratios.clamp(1 - clip_low, 1 + (clip_low if clip_high is None else clip_high))
    advantages = advantages.detach()
    return torch.maximum(-advantages * ratios, -advantages * clipped)


def ppo_penalty(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, coef: float
) -> Tensor:
    """PPO with a penalty (arXiv 1707.06347, equation 8), any shape: −A ρ + coef KL(π_old ‖ π), the
    KL by `step_kl`.
    """
    ratios = bounded_exp(logprobs - old_logprobs.detach())
    return -advantages.detach() * ratios + coef * step_kl(logprobs, old_logprobs)


def step_kl(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """ρ − 1 − log ρ of KL(π_old ‖ π), where π_old sampled: unbiased, as its gradient, and never
    negative. Any shape.
    """
    return excess(logprobs - old_logprobs.detach())


def group_advantages(rewards: Tensor, *, scale: bool = True) -> Tensor:
    """(r − mean) / (std + small) within each prompt's responses, [P, K] -> [P, K] (arXiv
    2402.03300).

    The deviation is that of a sample, divided by K − 1. scale=False leaves it out (Dr. GRPO, arXiv
    2503.20783).

    Raises ValueError for rewards of another shape, of a dtype that is not floating, and for a K
    below 2.
    """
    check_groups(rewards)
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + SMALL) if scale else centred


def overlong_penalty(lengths: Tensor, *, longest: int, margin: int) -> Tensor:
    """DAPO's soft punishment, to add to rewards, any shape (arXiv 2503.14476, equation 13): 0 up to
    longest − margin tokens, then falling to −1 at `longest`.
    """
    return ((longest - margin - lengths) / margin).clamp(-1.0, 0.0)


def rebel(logprobs: Tensor, old_logprobs: Tensor, rewards: Tensor, *, eta: float = 1.0) -> Tensor:
    """REBEL (arXiv 2404.16767, equation 1) of pairs, [..., 2] -> [...]: ((log ρ(y1) − log ρ(y2)) /
    η − (r1 − r2))².
    """
    rewards = rewards.detach()
    return (
        log_ratio_difference(logprobs, old_logprobs) / eta - (rewards[..., 0] - rewards[..., 1])
    ).square()


def nash_md(
    logprobs: Tensor, ref_logprobs: Tensor, preferred: Tensor, *, tau: float = 0.1
) -> Tensor:
    """Nash learning by mirror descent (Nash-MD, arXiv 2312.00886, section 7) of each response y;
    any shape.

    −(P(y ≻ y′) − ½ − τ log π/π_ref(y)) log π(y) with the bracket detached. preferred: P(y ≻ y′),
    the probability that y is preferred to y′, which is sampled from the geometric mixture π^(1 − β)
    π_ref^β of policy and reference. ½ is the baseline.
    """
    return reinforce(logprobs, preferred - 0.5 - tau * (logprobs - ref_logprobs))


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """CISPO (MiniMax-M1, arXiv 2506.13585, equation 4), any shape: −sg(clip(ρ, 1 − ε_low, 1 +
    ε_high)) A log π.
    """
    ratios = bounded_exp(logprobs.detach() - old_logprobs)
    return reinforce(logprobs, ratios.clamp(1 - clip_low, 1 + clip_high) * advantages)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Tensor:
    """SAPO (arXiv 2511.20347, the gate f), any shape: −A σ(τ (ρ − 1)) 4 / τ, whose slope is that of
    −A ρ at ρ = 1.

    A soft gate in the place of clipping. tau_pos, tau_neg (τ): where A > 0, and elsewhere (paper: 1
    and 1.05).
    """
    ratios, advantages = bounded_exp(logprobs - old_logprobs.detach()), advantages.detach()
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    return -advantages * torch.sigmoid(tau * (ratios - 1)) * 4 / tau


def vespo_weights(
    log_ratios: Tensor, advantages: Tensor, k: tuple[float, float], decay: tuple[float, float]
) -> Tensor:
    """VESPO's weights in `reinforce` (arXiv 2602.10693), any shape: φ(ρ) = ρ^k e^(λ (1 − ρ)), ρ of
    whole responses.

    log_ratios: log ρ. k, decay (λ): where A ≥ 0, and where it is below (authors: 2, 3 and 3, 2).
    """
    log_ratios = bounded(log_ratios.detach())
    more = torch.expm1(log_ratios)
    above, below = (power * log_ratios - rate * more for power, rate in zip(k, decay, strict=True))
    return bounded_exp(above.where(advantages >= 0, below))


def oapl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rewards: Tensor,
    *,
    beta1: float = 1.0,
    beta2: float = 1e-3,
) -> Tensor:
    """OAPL (arXiv 2602.19362, equation 3), [P, K] -> [P, K]: (β2 log ρ − r + V)², V = β1 log mean
    e^(r / β1) over K.
    """
    values = beta1 * ((rewards / beta1).logsumexp(1, keepdim=True) - math.log(rewards.shape[1]))
    return (beta2 * (logprobs - old_logprobs.detach()) - (rewards - values).detach()).square()


def copg(logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, *, beta: float = 0.06) -> Tensor:
    """CoPG (arXiv 2406.19185, equation 7) of pairs that any policy sampled, [..., 2] -> [...]: −(r1
    − r2 − β/2 Δ) Δ.
    """
    difference, rewards = log_ratio_difference(logprobs, ref_logprobs), rewards.detach()
    return -(rewards[..., 0] - rewards[..., 1] - beta / 2 * difference) * difference


# --- Preferences: losses of pairs, and of single responses (KTO) ----------------------------------
# Pairs are [P, 2]: column 0 is the chosen response, column 1 the rejected one. ℓ = log π/π_ref of a
# response; Δ is the chosen response's ℓ less the rejected one's.


def log_ratio_difference(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Δ, [..., 2] -> [...]."""
    log_ratios = logprobs - ref_logprobs.detach()
    return log_ratios[..., 0] - log_ratios[..., 1]


def dpo(
    logprobs: Tensor, ref_logprobs: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> Tensor:
    """Direct preference optimization (arXiv 2305.18290, equation 7): −log σ(β Δ), [P, 2] -> [P].

    The gradient is β (σ(β Δ) − 1) (∇ log π_chosen − ∇ log π_rejected). A larger β allows less
    deviation from the reference. If that is the policy that sampled the pairs, this is behavior
    preference optimization (BPO, arXiv 2406.12168). label_smoothing: the probability that a label
    is wrong (conservative DPO, Mitchell 2023).
    """
    return logistic(beta * log_ratio_difference(logprobs, ref_logprobs), label_smoothing)


def logistic(difference: Tensor, label_smoothing: float) -> Tensor:
    """−(1 − ε) log σ(d) − ε log σ(−d); any shape. label_smoothing: ε, the probability that a label
    is wrong.
    """
    loss = -(1 - label_smoothing) * logsigmoid(difference)
    return loss - label_smoothing * logsigmoid(-difference) if label_smoothing else loss


def ipo(logprobs: Tensor, ref_logprobs: Tensor, *, tau: float = 0.1) -> Tensor:
    """Identity preference optimization (arXiv 2310.12036, equation 17): (Δ − 1 / (2 τ))², [P, 2] ->
    [P].

    The paper's log-probs are sums over a response. Means over its tokens, which its authors advise
    and TRL takes, are passed in the same way. IPO-MD is this loss of pairs from the mixture of
    policy and reference (see `nash_md`).
    """
    return (log_ratio_difference(logprobs, ref_logprobs) - 1 / (2 * tau)).square()


def simpo(
    mean_logprobs: Tensor, *, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0
) -> Tensor:
    """Simple preference optimization, without a reference (arXiv 2405.14734, equation 6), [P, 2] ->
    [P].

    −log σ(β (mean log π_chosen − mean log π_rejected) − γ). mean_logprobs: means over the tokens of
    each response. gamma: the target margin. label_smoothing: as in `dpo`; the mirrored term has the
    margin's sign turned, too.
    """
    return logistic(beta * (mean_logprobs[:, 0] - mean_logprobs[:, 1]) - gamma, label_smoothing)


def orpo(mean_logprobs: Tensor, *, weight: float = 0.1) -> Tensor:
    """Odds ratio preference optimization, without a reference (arXiv 2403.07691, equation 6), [P,
    2] -> [P].

    −mean log π_chosen − λ log σ(log odds_chosen − log odds_rejected). mean_logprobs: means over the
    tokens of each response. The p of a response's odds p / (1 − p) is the geometric mean of its
    tokens' probabilities. weight: λ.
    """
    log_odds = mean_logprobs - log1mexp(mean_logprobs)
    return -mean_logprobs[:, 0] - weight * logsigmoid(log_odds[:, 0] - log_odds[:, 1])


def log1mexp(logprobs: Tensor) -> Tensor:
    """log(1 − e^x), x < 0, in two forms, each used where it loses no digits (Mächler, "Accurately
    computing log(1 − exp(−|a|))", 2012). A probability that rounds to 1 counts as the largest below
    1.
    """
    logprobs = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    near = logprobs > -math.log(2)
    # Each form gets a harmless value where the other is taken, or its gradient there would be NaN.
    by_expm1 = (-torch.expm1(logprobs.where(near, -1.0))).log()
    by_log1p = torch.log1p(-logprobs.where(~near, -1.0).exp())
    return torch.where(near, by_expm1, by_log1p)


def cpo(
    logprobs: Tensor, *, beta: float = 0.1, weight: float = 1.0, label_smoothing: float = 0.0
) -> Tensor:
    """Contrastive preference optimization, without a reference (arXiv 2401.08417, equations 3 and
    4), [P, 2] -> [P].

    −log σ(β (log π_chosen − log π_rejected)) − λ log π_chosen. weight: λ, 1 in the paper.
    label_smoothing: as in `dpo`.
    """
    return (
        logistic(beta * (logprobs[:, 0] - logprobs[:, 1]), label_smoothing)
        - weight * logprobs[:, 0]
    )


def slic(logprobs: Tensor, *, delta: float = 1.0, weight: float = 1.0) -> Tensor:
    """SLiC-HF (2305.10425, equation 1), [P, 2] -> [P]: max(0, δ − log π_chosen + log π_rejected) −
    λ log π_chosen.
    """
    return (delta - logprobs[:, 0] + logprobs[:, 1]).clamp(min=0) - weight * logprobs[:, 0]


def apo_zero(logprobs: Tensor, ref_logprobs: Tensor, *, beta: float = 0.1) -> Tensor:
    """APO-zero (arXiv 2408.06266), [P, 2] -> [P]: 1 − σ(β ℓ_chosen) + σ(β ℓ_rejected). For data
    better than π's own.
    """
    chosen, rejected = (beta * (logprobs - ref_logprobs.detach())).unbind(1)
    return (-chosen).sigmoid() + rejected.sigmoid()


def apo_down(logprobs: Tensor, ref_logprobs: Tensor, *, beta: float = 0.1) -> Tensor:
    """APO-down (arXiv 2408.06266), [P, 2] -> [P]: σ(β ℓ_chosen) + 1 − σ(β Δ). For data worse than
    π's own.
    """
    chosen, rejected = (beta * (logprobs - ref_logprobs.detach())).unbind(1)
    return chosen.sigmoid() + (rejected - chosen).sigmoid()


def discopop(
    logprobs: Tensor, ref_logprobs: Tensor, *, beta: float = 0.05, tau: float = 0.05
) -> Tensor:
    """DiscoPOP (arXiv 2406.08414, equation 5), [P, 2] -> [P]: (1 − m) (−log σ(β Δ)) + m e^(−β Δ), m
    = σ(β Δ / τ).
    """
    difference = beta * log_ratio_difference(logprobs, ref_logprobs)
    # m e^(−β Δ) in one exponential: far below 0 one factor is 0 and the other infinite.
    exponential = bounded_exp(logsigmoid(difference / tau) - difference)
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

    λ_D (1 − σ(β (ℓ − z0))) for a desirable response, λ_U (1 − σ(β (z0 − ℓ))) for another one.
    desirable: bool, of the same shape. reference_point: z0 of `kto_reference_point`, 0-d.
    """
    log_ratios = logprobs - ref_logprobs.detach()
    distance = beta * (log_ratios - reference_point)
    return (desirable_weight * (-distance).sigmoid()).where(
        desirable, undesirable_weight * distance.sigmoid()
    )


def kto_reference_point(mismatched_logprobs: Tensor, mismatched_ref_logprobs: Tensor) -> Tensor:
    """z0: the mean of ℓ over prompts with another prompt's response, at least 0; 0-d, detached.

    It is a mean over the whole batch: with several processes or accumulation, average before
    cutting off at 0.
    """
    return (mismatched_logprobs - mismatched_ref_logprobs).detach().mean().clamp(min=0)
