"""A reward in its standard deviations, with an offset per prompt and a factor."""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.frontier.tasks.offsets import Offset, on_grid
from fastp3o.rewards.reward import Reward
from fastp3o.rollouts.groups import Group


@dataclass(frozen=True)
class OffsetReward:
    """A reward in its standard deviations, plus `sd` times an offset, both on the grid; all times `factor`.

    mean, std: those of the scores by which the reward is standardised.
    """

    reward: Reward
    mean: float
    std: float
    offset: Offset | None = None
    sd: float = 0.0
    factor: float = 1.0

    def __call__(self, groups: list[Group]) -> Tensor:
        """[P, K] fp32."""
        scores = self.reward(groups).tolist()
        offsets = [on_grid(self.sd * self.offset(group.prompt.text)) if self.offset else 0.0 for group in groups]
        return torch.tensor(
            [
                [self.factor * (on_grid((score - self.mean) / self.std) + offset) for score in group]
                for group, offset in zip(scores, offsets, strict=True)
            ],
            dtype=torch.float32,
        )
