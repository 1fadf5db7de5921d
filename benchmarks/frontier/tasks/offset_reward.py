"""A reward in its standard deviations, with an offset and a factor per prompt, or less the prompt's mean."""

import math
from dataclasses import dataclass
from statistics import stdev

import torch
from torch import Tensor

from benchmarks.frontier.tasks.offsets import Offset, on_grid, unlearnable
from fastp3o.rewards.reward import Reward
from fastp3o.rollouts.groups import Group
from fastp3o_kernels.losses import SMALL


@dataclass(frozen=True)
class OffsetReward:
    """A reward in its standard deviations, times a factor of the prompt, plus `sd` times an offset, both on the grid;
    all times `factor`.

    mean, std: those of the scores by which the reward is standardised. spread: standard deviation of the log of the
    prompt's factor, a log-normal number of mean 1. centred: less the mean of the prompt's responses. standardised: and
    divided by their deviation, as GRPO does. plain: prompts, those of evaluations, with none of the three.
    """

    reward: Reward
    mean: float
    std: float
    offset: Offset | None = None
    sd: float = 0.0
    factor: float = 1.0
    spread: float = 0.0
    centred: bool = False
    standardised: bool = False
    plain: frozenset[str] = frozenset()

    def __call__(self, groups: list[Group]) -> Tensor:
        """[P, K] fp32."""
        scores = zip(groups, self.reward(groups).tolist(), strict=True)
        return torch.tensor([self.rewards(group.prompt.text, own) for group, own in scores], dtype=torch.float32)

    def rewards(self, prompt: str, scores: list[float]) -> list[float]:
        """Of the responses to a prompt."""
        plain = prompt in self.plain
        scale = 1.0 if plain else prompts_factor(prompt, self.spread)
        offset = on_grid(self.sd * self.offset(prompt)) if self.offset else 0.0
        rewards = [self.factor * (on_grid(scale * (score - self.mean) / self.std) + offset) for score in scores]
        if plain or not (self.centred or self.standardised):
            return rewards
        centre = sum(rewards) / len(rewards)
        deviation = stdev(rewards) + SMALL if self.standardised else 1.0
        return [(reward - centre) / deviation for reward in rewards]


def prompts_factor(prompt: str, spread: float) -> float:
    """A log-normal number of mean 1 that nothing but the prompt's text determines."""
    return math.exp(spread * unlearnable(f"factor of {prompt}") - spread**2 / 2)
