"""Objectives as functions of log-probabilities, for `linear_loss`, `linear_logprobs` or a head of one's own.

They return the loss of each pair, response or token, to be summed by an objective of `linear_loss` or averaged. P3O's,
which have kernels of their own, are in `fastp3o_kernels.p3o`. What is known of a response beside the policy's log-probs
(old and reference log-probs, rewards, advantages) is a constant everywhere.
"""

from fastp3o_kernels.losses.apo import apo_down, apo_zero
from fastp3o_kernels.losses.cpo import cpo
from fastp3o_kernels.losses.discopop import discopop
from fastp3o_kernels.losses.dpo import bpo, dpo
from fastp3o_kernels.losses.grpo import dapo, group_advantages, grpo, grpo_plus, overlong_penalty
from fastp3o_kernels.losses.gspo import gspo
from fastp3o_kernels.losses.ipo import ipo
from fastp3o_kernels.losses.kl import k1, k2, k3
from fastp3o_kernels.losses.kto import kto, kto_reference_point
from fastp3o_kernels.losses.nash_md import nash_md
from fastp3o_kernels.losses.orpo import orpo
from fastp3o_kernels.losses.policy_gradient import ppg, reinforce, rloo_advantages
from fastp3o_kernels.losses.ppo_clip import ppo_clip
from fastp3o_kernels.losses.rebel import rebel
from fastp3o_kernels.losses.simpo import simpo
from fastp3o_kernels.losses.slic import slic

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
