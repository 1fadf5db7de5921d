"""The rewards that environments give for a trajectory's turns, for `--reward environment`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fastp3o.rollouts.groups import Group


class EnvironmentReward:
    """The weighted sum of the rewards of all turns. weights: by the names of the rewards."""

    def __init__(self, weights: Mapping[str, float]):
        self.weights = weights

    def __call__(self, groups: list[Group]) -> Tensor:
        parts = self.parts(groups)
        return torch.stack([weight * parts[name] for name, weight in self.weights.items()]).sum(0)

    def parts(self, groups: list[Group]) -> dict[str, Tensor]:
        """The sums over turns of each reward, unweighted, [P, K] fp32."""
        return {
            name: torch.tensor(
                [[sum(turn.rewards.get(name, 0.0) for turn in r.turns) for r in group.responses] for group in groups],
                dtype=torch.float32,
            )
            for name in self.weights
        }
