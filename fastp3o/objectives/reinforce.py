"""REINFORCE with a baseline (Williams 1992), and leave-one-out, RLOO (Kool et al. 2019, arXiv 2402.14740).

A response is one action: −A log π(y|x), unclipped. That is the policy's gradient where the policy has not moved since
it sampled, so a round is one pass by default.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastp3o.config import objective_name, option
from fastp3o.objectives.base import SumOverProcesses
from fastp3o.objectives.policy_gradient import PolicyGradient, PolicyGradientConfig
from fastp3o.rewards.scaling import AbsoluteScaler
from fastp3o_kernels.head.groups import Groups
from fastp3o_kernels.losses import reinforce, rloo_advantages


@dataclass(frozen=True, kw_only=True)
class RLOOConfig(PolicyGradientConfig):
    """RLOO (arXiv 2402.14740): the baseline of a response is the mean reward of its prompt's others."""

    objective: str = objective_name("rloo")
    inner_epochs: int = option(1, "Passes over each round's rollouts; the loss is on-policy in the first step alone.")

    def build(self) -> "RLOO":
        return RLOO(self, loss_mean="sum")


class RLOO(PolicyGradient):
    """Unclipped, with the mean reward of a prompt's other responses as the baseline."""

    def advantages(self, rewards: Tensor) -> Tensor:
        return rloo_advantages(rewards)

    def losses(self, groups: Groups) -> Tensor:
        return reinforce(groups.logprobs, groups["advantages"])


@dataclass(frozen=True, kw_only=True)
class REINFORCEConfig(RLOOConfig):
    """REINFORCE (Williams 1992): the baseline is the mean reward of all responses of an update."""

    objective: str = objective_name("reinforce")
    reward_scaling: str = field(
        default="none",
        metadata={
            "help": "absolute: divide rewards by their running standard deviation; none. Differences within a prompt, "
            "which other objectives scale, would be a baseline of their own.",
            "choices": ["absolute", "none"],
        },
    )

    def build(self) -> "REINFORCE":
        return REINFORCE(self, loss_mean="sum")


class REINFORCE(RLOO):
    """Unclipped, with the mean reward of an update as the baseline."""

    def __init__(self, config: REINFORCEConfig, *, loss_mean: str):
        super().__init__(config, loss_mean=loss_mean)
        # Differences within a prompt would be rewards without what prompts differ in.
        self.scaler = AbsoluteScaler(config.reward_clip, scale=config.reward_scaling == "absolute")

    def all_advantages(self, rewards: list[Tensor], sum_over_processes: SumOverProcesses) -> list[Tensor]:
        together = torch.cat(rewards).double()
        total, count = sum_over_processes(torch.stack([together.sum(), together.new_tensor(together.numel())])).tolist()
        return [part - total / count for part in rewards]
