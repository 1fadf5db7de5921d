"""Losses as functions of log-probabilities, for `linear_loss`, `linear_logprobs` or a head of one's own.

They return the loss of each pair, response or token, to be summed by an objective of `linear_loss` or averaged. Only
the policy's log-probs get gradients: old and reference log-probs, rewards and advantages are constants everywhere.
P3O's losses, which have kernels of their own, are in `fastp3o_kernels.p3o`.
"""

from fastp3o_kernels.losses.kl import k1, k2, k3
from fastp3o_kernels.losses.policy_gradient import (
    dapo,
    group_advantages,
    grpo,
    grpo_plus,
    gspo,
    nash_md,
    ppg,
    ppo_clip,
    rebel,
    reinforce,
    rloo_advantages,
)
from fastp3o_kernels.losses.preferences import (
    apo_down,
    apo_zero,
    bpo,
    cpo,
    discopop,
    dpo,
    ipo,
    kto,
    kto_reference_point,
    orpo,
    simpo,
    slic,
)
from fastp3o_kernels.overlong_penalty import overlong_penalty

__all__ = [
    "apo_down",
    "apo_zero",
    "bpo",
    "cpo",
    "dapo",
    "discopop",
    "dpo",
    "group_advantages",
    "grpo",
    "grpo_plus",
    "gspo",
    "ipo",
    "k1",
    "k2",
    "k3",
    "kto",
    "kto_reference_point",
    "nash_md",
    "orpo",
    "overlong_penalty",
    "ppg",
    "ppo_clip",
    "rebel",
    "reinforce",
    "rloo_advantages",
    "simpo",
    "slic",
]
