"""A reward in its standard deviations, with an offset and a factor per prompt, or less the prompt's
mean.

An offset δ(x) is equal for all responses to a prompt: preferences stay, and a critic has more to
learn.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from fastp3o.rewards.reward import Reward
from fastp3o.rollouts.groups import Group

# Multiples of it up to 2^13 have 23 bits, so fp32 holds them and their sums exactly: the difference
# of two rewards has the same bits with an offset as without.
GRID = 2.0**-10

Offset = Callable[[str], float]


def unlearnable(prompt: str) -> float:
    """A normal number from a cryptographic hash of the prompt, which nothing predicts for an unseen
    prompt.
    """
    bits = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:6])
    return NormalDist().inv_cdf((bits + 0.5) / 2**48)


OFFSETS: dict[str, Offset | None] = {"none": None, "unlearnable": unlearnable}


def on_grid(value: float) -> float:
    """The nearest multiple of GRID."""
    return round(value / GRID) * GRID


@dataclass(frozen=True)
class OffsetReward:
    """A reward in its standard deviations, times a factor of the prompt, plus `sd` times an offset,
    both on the grid; all times `factor`.

    mean, std: those of the scores by which the reward is standardized. spread: standard deviation
    of the log of the prompt's factor, a log-normal number of mean 1. centred: less the mean of the
    prompt's responses. plain: prompts, those of evaluations, with neither factor nor centring.
    """

    reward: Reward
    mean: float
    std: float
    offset: Offset | None = None
    sd: float = 0.0
    factor: float = 1.0
    spread: float = 0.0
    centred: bool = False
    plain: frozenset[str] = frozenset()

    def __call__(self, groups: list[Group]) -> Tensor:
        """[P, K] fp32."""
        scores = zip(groups, self.reward(groups).tolist(), strict=True)
        return torch.tensor(
            [self.rewards(group.prompt.text, own) for group, own in scores], dtype=torch.float32
        )

    def fingerprint(self) -> str:
        """Nothing to compare: runs of the study are not resumed."""
        return ""

    def rewards(self, prompt: str, scores: list[float]) -> list[float]:
        """Of the responses to a prompt."""
        plain = prompt in self.plain
        scale = 1.0 if plain else prompts_factor(prompt, self.spread)
        offset = on_grid(self.sd * self.offset(prompt)) if self.offset else 0.0
        rewards = [
            self.factor * (on_grid(scale * (score - self.mean) / self.std) + offset)
            for score in scores
        ]
        centre = sum(rewards) / len(rewards) if self.centred and not plain else 0.0
        return [reward - centre for reward in rewards]


def prompts_factor(prompt: str, spread: float) -> float:
    """A log-normal number of mean 1 that nothing but the prompt's text determines."""
    return math.exp(spread * unlearnable(f"factor of {prompt}") - spread**2 / 2)
