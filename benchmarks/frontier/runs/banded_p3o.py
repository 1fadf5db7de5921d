"""Joint P3O whose clipping knows how long responses are, as a function that `train` takes as an
objective.

P3O clips a sum of log-ratios over all tokens of two responses at ε, whatever their lengths L1 and
L2. Where errors and moves of tokens are independent, such a sum spreads with √L; where they all
point one way, it grows with L. At a length L0 of both responses every arm is P3O itself.

    arm         log-ratio of response i, ℓ_i    band of ℓ_1 − ℓ_2
    fixed       log ρ_i                         ε (joint P3O)
    root band   log ρ_i                         ε √((L1 + L2) / 2 L0)
    per root    log ρ_i √(L0 / L_i)             ε
    means       log ρ_i L0 / L_i                ε (GSPO's mean over tokens, times L0)

The loss of a pair is max(−q c m, −q c clip(m, ± band)) / 2 with m = ℓ_1 − ℓ_2 and c = sg(clip(exp(ℓ_1
+ ℓ_2), 1/C, C)), a mean over pairs; q as in `fastp3o_kernels.p3o`, with the KL of whole responses.
Rewards enter by their differences alone, and every ℓ is 0 at the old policy.

Scaling a log-ratio scales its gradient: a token of a response of L tokens has the weight √(L0 / L)
with `per root` and L0 / L with `means`, so in pairs of unequal lengths the shorter response moves
more. The expected gradient is no longer that of the reward.
"""

from typing import Any

import torch
from torch import Tensor

from fastp3o_kernels import Groups
from fastp3o_kernels.p3o.settings import LOG_RATIO_LIMIT

LENGTH = 16.0  # L0, in tokens: about that of the languages on which ε = 0.2 was found good
# Arm -> settings of `banded_p3o`: exponents of the band's growth and of the log-ratios' division.
ARMS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "root band": {"growth": 0.5},
    "per root": {"division": 0.5},
    "means": {"division": 1.0},
}


def banded_p3o(
    groups: Groups,
    old: Tensor,
    ref: Tensor,
    rewards: Tensor,
    *,
    kl_coef: float = 0.0,
    growth: float = 0.0,
    division: float = 0.0,
    length: float = LENGTH,
    clip_range: float = 0.2,
    ratio_cap: float = 10.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum over prompts of the mean loss of their pairs, and sums of two shares of a prompt's
    pairs.

    Args:
        groups: of P prompts with K responses each.
        old: [P, K] log-probabilities before the update.
        ref: [P, K] log-probabilities of the reference.
        rewards: [P, K].
        kl_coef: β, the weight of the KL to the reference in q.
        growth: exponent of (L1 + L2) / 2 L0 in the band; 0 keeps it at ε.
        division: exponent of L0 / L in a response's log-ratio; 0 leaves the sum over tokens.
        length: L0, in tokens.
        clip_range: ε.
        ratio_cap: C.

    Returns:
        The loss, 0-d, and the metrics `clip_fraction`, pairs outside of their band, and
        `gradient_left`, the share of Σ |q c| whose pairs still have a gradient.
    """
    K = rewards.shape[1]
    first, second = torch.triu_indices(K, K, offset=1, device=rewards.device)
    lengths = groups.lengths.clamp(min=1).to(groups.logprobs.dtype)
    log_ratios = (groups.logprobs - old) * (length / lengths) ** division
    moved = log_ratios[:, first] - log_ratios[:, second]
    to_reference = groups.logprobs.detach() - ref
    # Differences of rewards come first: no offset that they share may round anything.
    q = (rewards[:, first] - rewards[:, second]) - kl_coef * (
        to_reference[:, first] - to_reference[:, second]
    )
    both = (log_ratios[:, first] + log_ratios[:, second]).detach()
    capped = both.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(1 / ratio_cap, ratio_cap)
    weights = -q * capped
    band = clip_range * ((lengths[:, first] + lengths[:, second]) / (2 * length)) ** growth
    unclipped, clipped = weights * moved, weights * moved.clamp(-band, band)
    sizes, left = weights.abs(), clipped.detach() <= unclipped.detach()
    # Rewards that are equal have no gradient to lose.
    lost = (sizes * ~left).sum(1) / sizes.sum(1).clamp(min=torch.finfo(sizes.dtype).tiny)
    metrics = {
        "clip_fraction": (moved.detach().abs() > band).to(sizes.dtype).mean(1).sum(),
        "gradient_left": (1 - lost).sum(),
    }
    return torch.maximum(unclipped, clipped).mean(1).sum() / 2, metrics
