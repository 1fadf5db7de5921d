"""Rewards of the responses to a prompt: their differences in pairs, and scalers of the differences
or the rewards.
"""

from abc import ABC, abstractmethod
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

# Values without which nothing is an outlier, and the deviations beyond which one may be.
ENOUGH, OUTLYING = 8, 10.0
# A normal distribution's median distance from its mean, in deviations.
MEDIAN = 0.6745


def pairs(values: Tensor) -> Tensor:
    """(v_i, v_j) of all i < j, [P, K] -> [P, K (K − 1) / 2, 2]."""
    K = values.shape[1]
    return values[:, torch.triu_indices(K, K, offset=1, device=values.device).T]


def differences(values: Tensor) -> Tensor:
    """v_i − v_j of all i < j, [P, K] -> [P, K (K − 1) / 2]. What has them already, [P, K, K], need
    not have any v.
    """
    if values.dim() == 3:
        K = values.shape[1]
        first_places, second_places = torch.triu_indices(K, K, offset=1, device=values.device)
        return values[:, first_places, second_places]
    first, second = pairs(values).unbind(-1)
    return first - second


def tied(rewards: Tensor) -> Tensor:
    """[P] bool: whether all rewards [P, K] of a prompt are equal, so that their differences teach
    nothing.
    """
    return (rewards == rewards[:, :1]).all(dim=1)


class Outlier(NamedTuple):
    """A value's distance from the mean, and the one with which it enters the deviation."""

    distance: float
    bound: float


class Scaler(ABC):
    """Divides values by their running standard deviation, and bounds the results. clip: bound, 0
    for none. scale: False leaves the deviation at 1, so that rewards are only bounded.

    The deviation is of all values so far, so that one of a thousand deviations would make all later
    ones too small for the rest of the run. An outlier therefore enters it bounded: at ten
    deviations of what came before, or at as much as all of that together where this is more. So no
    reward ever more than doubles the variance once there are a hundred, and one whose scale has
    changed, or that is rarely not 0, doubles it each time until it counts in full. As long as
    nothing came before, ten deviations are those of the update's own median. Fewer than eight
    values are taken as they are. outlier: the farthest of the last call; None without one.
    """

    def __init__(self, clip: float, *, scale: bool = True):
        self.clip = clip if clip > 0 else float("inf")
        self.scale = scale
        self.count = 0
        self.sum = 0.0
        self.sum_of_squares = 0.0
        self.outlier: Outlier | None = None

    @abstractmethod
    def __call__(self, rewards: Tensor) -> Tensor:
        """Adds rewards [P, K] fp32 of all processes to the running statistics, and scales them."""

    @abstractmethod
    def of_pairs(self, table: Tensor) -> Tensor:
        """The same for what stands for differences of rewards, [P, K, K] fp32, skew-symmetric: D of
        comparisons.
        """

    @abstractmethod
    def std(self) -> float:
        """The deviation that divides."""

    def update(self, values: Tensor, centre: float, *, shared_by: int) -> None:
        """Adds values to the running statistics. centre: the mean, or about. shared_by: values that
        a reward is in.
        """
        values = values.double()
        distances = (values - centre).abs()
        bound, farthest = self.bound(distances, centre, shared_by), distances.max().item()
        self.outlier = Outlier(farthest, bound) if farthest > bound else None
        values = values.clamp(centre - bound, centre + bound)
        self.count += values.numel()
        self.sum += values.sum().item()
        self.sum_of_squares += values.square().sum().item()

    def bound(self, distances: Tensor, centre: float, shared_by: int) -> float:
        """How far from the centre values enter the statistics."""
        if not self.scale:
            return inf
        variance = self.sum_of_squares / self.count - centre**2 if self.count >= ENOUGH else 0.0
        if variance > 0:
            return variance**0.5 * max(OUTLYING, (self.count / shared_by) ** 0.5)
        not_tied = distances[distances > 0]
        return OUTLYING / MEDIAN * not_tied.median().item() if len(not_tied) >= ENOUGH else inf

    def deviation_around(self, mean: float) -> float:
        if not self.scale:
            return 1.0
        variance = self.sum_of_squares / self.count - mean**2
        return max(variance, 0.0) ** 0.5 or 1.0

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "sum": self.sum, "sum_of_squares": self.sum_of_squares}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.count, self.sum = int(state_dict["count"]), state_dict["sum"]
        self.sum_of_squares = state_dict["sum_of_squares"]


def scaler_of_differences(kind: str, clip: float) -> "Scaler":
    """The scaler for losses that see only differences. kind: what is divided, `difference`,
    `absolute` or `none`.
    """
    scaler = AbsoluteScaler if kind == "absolute" else DifferenceScaler
    return scaler(clip, scale=kind != "none")


class DifferenceScaler(Scaler):
    """Rewards become their distance from the prompt's mean, divided by the deviation of all
    differences of pairs so far and kept within ±clip/2, so that no difference exceeds `clip`.

    For two responses that is ±d/2 with d = clip((r1 - r2) / std). Responses are exchangeable, so
    the mean difference is zero and the deviation is the root mean square. A reward shifted per
    prompt gives the same.
    """

    def __call__(self, rewards: Tensor) -> Tensor:
        self.update(differences(rewards), 0.0, shared_by=rewards.shape[1] - 1)
        # Differences come first: they are exact, a shift is not.
        first_minus_rewards = rewards[:, :1] - rewards
        centred = first_minus_rewards.mean(dim=1, keepdim=True) - first_minus_rewards
        return (centred / self.std()).clamp(-self.clip / 2, self.clip / 2)

    def of_pairs(self, table: Tensor) -> Tensor:
        self.update(differences(table), 0.0, shared_by=table.shape[1] - 1)
        return (table / self.std()).clamp(-self.clip, self.clip)

    def std(self) -> float:
        return self.deviation_around(0.0)


class AbsoluteScaler(Scaler):
    """Each reward is divided by the deviation of all rewards so far and kept within ±clip, as in
    the first author's code and in PPO's. A shift per prompt widens that deviation.
    """

    def __call__(self, rewards: Tensor) -> Tensor:
        centre = self.sum / self.count if self.count >= ENOUGH else rewards.double().median().item()
        self.update(rewards, centre, shared_by=1)
        return (rewards / self.std()).clamp(-self.clip, self.clip)

    def of_pairs(self, table: Tensor) -> Tensor:
        # The deviation is of rewards, and row means are those of the responses.
        self(table.mean(dim=2))
        return (table / self.std()).clamp(-2 * self.clip, 2 * self.clip)

    def std(self) -> float:
        return self.deviation_around(self.sum / self.count)
