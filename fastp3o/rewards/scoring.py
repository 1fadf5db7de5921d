"""What rollouts are worth: a reward or several, added up, less penalties."""

from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from fastp3o.rewards.config import PenaltyConfig
from fastp3o.rewards.penalties import penalties
from fastp3o.rewards.reward import Reward
from fastp3o.rollouts.rollouts import Rollouts


class WeightedSum:
    """Rewards by name, each times its weight, added up."""

    def __init__(self, rewards: Mapping[str, Reward], weights: Sequence[float]):
        self.rewards, self.weights = rewards, weights

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """[P, K] fp32, on the CPU."""
        return self.sum([reward(rollouts) for reward in self.rewards.values()])

    def sum(self, values: Sequence[Tensor]) -> Tensor:
        """Of the values of each reward [P, K]."""
        weighted = [weight * value.float().cpu() for weight, value in zip(self.weights, values, strict=True)]
        return torch.stack(weighted).sum(0)


def weighted(rewards: Mapping[str, Reward], weights: Sequence[float]) -> Reward:
    """The sum of rewards; a single one of weight 1 stays as it is."""
    return next(iter(rewards.values())) if list(weights) == [1.0] else WeightedSum(rewards, weights)


def scored(rewards: Mapping[str, Reward], rollouts: Rollouts) -> dict[str, Tensor]:
    """Rewards [P, K] fp32 by their names, and each part of a sum without its weight, as `name/part`."""
    scores: dict[str, Tensor] = {}
    for name, reward in rewards.items():
        if isinstance(reward, WeightedSum):
            parts = {f"{name}/{part}": single(rollouts) for part, single in reward.rewards.items()}
            scores |= {name: reward.sum(list(parts.values()))} | parts
        else:
            scores[name] = reward(rollouts)
    return scores


def scores_of(
    accelerator: Accelerator, reward: Reward, rollouts: Rollouts, config: PenaltyConfig, longest: int
) -> dict[str, Tensor]:
    """[P, K] fp32 by name: `reward`, less all penalties; and what it is made of, where that is more than one reward.

    longest: tokens that a response may have.
    """
    subtracted = penalties(rollouts, config, longest)
    scores = scored({"reward": reward}, rollouts) | subtracted
    scores = {name: values.to(accelerator.device) for name, values in scores.items()}
    for name in subtracted:
        scores["reward"] = scores["reward"] - scores[name]
    return scores
