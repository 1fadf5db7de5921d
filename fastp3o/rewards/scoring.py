"""What rollouts are worth: a reward or several, added up, less penalties."""

from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from fastp3o.endpoint import EndpointError
from fastp3o.named_function import FunctionError
from fastp3o.rewards.config import PenaltyConfig
from fastp3o.rewards.penalties import penalties
from fastp3o.rewards.reward import Reward
from fastp3o.rollouts.rollouts import Rollouts


class WeightedSum:
    """Rewards by name, each times its weight, added up. What has weight 0 is only watched, and may be NaN.

    weights: not all 0.
    """

    def __init__(self, rewards: Mapping[str, Reward], weights: Sequence[float]):
        self.rewards, self.weights = rewards, weights

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """[P, K] fp32, on the CPU."""
        return self.sum([reward(rollouts) for reward in self.rewards.values()])

    def sum(self, values: Sequence[Tensor]) -> Tensor:
        """Of the values of each reward [P, K]."""
        weighted = [weight * value.float().cpu() for weight, value in zip(self.weights, values, strict=True) if weight]
        return torch.stack(weighted).sum(0)


def weighted(rewards: Mapping[str, Reward], weights: Sequence[float]) -> Reward:
    """The sum of rewards; a single one of weight 1 stays as it is."""
    return next(iter(rewards.values())) if list(weights) == [1.0] else WeightedSum(rewards, weights)


def scored(accelerator: Accelerator, rewards: Mapping[str, Reward], rollouts: Rollouts) -> dict[str, Tensor]:
    """Rewards [P, K] fp32 by their names, and each part of a sum without its weight, as `name/part`.

    Raises EndpointError or FunctionError on every process where a reward fails on any, once all others are computed: a
    model that is spread over processes needs all of them.
    """
    scores: dict[str, Tensor] = {}
    failures: list[EndpointError | FunctionError] = []
    for name, single in singles(rewards).items():
        try:
            scores[name] = single(rollouts)
        except (EndpointError, FunctionError) as error:
            failures.append(error)
    if of_all := gather_object([type(failure)(str(failure)) for failure in failures]):
        raise of_all[0] from (failures[0] if failures else None)
    sums = {
        name: reward.sum([scores[f"{name}/{part}"] for part in reward.rewards])
        for name, reward in rewards.items()
        if isinstance(reward, WeightedSum)
    }
    return sums | scores


def singles(rewards: Mapping[str, Reward]) -> dict[str, Reward]:
    """The rewards that are no sums, and the parts of those that are."""
    found: dict[str, Reward] = {}
    for name, reward in rewards.items():
        parts = reward.rewards if isinstance(reward, WeightedSum) else None
        found |= {name: reward} if parts is None else {f"{name}/{part}": single for part, single in parts.items()}
    return found


def scores_of(
    accelerator: Accelerator, reward: Reward, rollouts: Rollouts, config: PenaltyConfig, longest: int
) -> dict[str, Tensor]:
    """[P, K] fp32 by name: `reward`, less all penalties; and what it is made of, where that is more than one reward.

    longest: tokens that a response may have. Raises what `scored` does.
    """
    subtracted = penalties(rollouts, config, longest)
    scores = scored(accelerator, {"reward": reward}, rollouts) | subtracted
    scores = {name: values.to(accelerator.device) for name, values in scores.items()}
    for name in subtracted:
        scores["reward"] = scores["reward"] - scores[name]
    return scores
