"""Rewards of the responses to a prompt: their differences in pairs, and scalers of the differences or the rewards."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


def pairs(values: Tensor) -> Tensor:
    """(v_i, v_j) of all i < j, [P, K] -> [P, K (K − 1) / 2, 2]."""
    K = values.shape[1]
    return values[:, torch.triu_indices(K, K, offset=1, device=values.device).T]


def differences(values: Tensor) -> Tensor:
    """v_i − v_j of all i < j, [P, K] -> [P, K (K − 1) / 2]."""
    first, second = pairs(values).unbind(-1)
    return first - second


def tied(rewards: Tensor) -> Tensor:
    """[P] bool: whether all rewards [P, K] of a prompt are equal, so that their differences teach nothing."""
    return (rewards == rewards[:, :1]).all(dim=1)


class Scaler(ABC):
    """Divides values by their running standard deviation, and bounds the results. clip: bound, 0 for none. scale: False
    leaves the deviation at 1, so that rewards are only bounded.
    """

    def __init__(self, clip: float, *, scale: bool = True):
        self.clip = clip if clip > 0 else float("inf")
        self.scale = scale
        self.count = 0
        self.sum = 0.0
        self.sum_of_squares = 0.0

    @abstractmethod
    def __call__(self, rewards: Tensor) -> Tensor:
        """Adds rewards [P, K] fp32 of all processes to the running statistics, and scales them."""

    @abstractmethod
    def std(self) -> float:
        """The deviation that divides."""

    def update(self, values: Tensor) -> None:
        """Adds values to the running statistics."""
        values = values.double()
        self.count += values.numel()
        self.sum += values.sum().item()
        self.sum_of_squares += values.square().sum().item()

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
    """For losses that see only differences. kind: what is divided, `difference`, `absolute` or `none`."""
    scaler = AbsoluteScaler if kind == "absolute" else DifferenceScaler
    return scaler(clip, scale=kind != "none")


class DifferenceScaler(Scaler):
    """Rewards become their distance from the prompt's mean, divided by the deviation of all differences of pairs so far
    and kept within ±clip/2, so that no difference exceeds `clip`.

    For two responses that is ±d/2 with d = clip((r1 - r2) / std). Responses are exchangeable, so the mean difference is
    zero and the deviation is the root mean square. A reward shifted per prompt gives the same.
    """

    def __call__(self, rewards: Tensor) -> Tensor:
        self.update(differences(rewards))
        # Differences come first: they are exact, a shift is not.
        first_minus_rewards = rewards[:, :1] - rewards
        centred = first_minus_rewards.mean(dim=1, keepdim=True) - first_minus_rewards
        return (centred / self.std()).clamp(-self.clip / 2, self.clip / 2)

    def std(self) -> float:
        return self.deviation_around(0.0)


class AbsoluteScaler(Scaler):
    """Each reward is divided by the deviation of all rewards so far and kept within ±clip, as in the first author's
    code and in PPO's. A shift per prompt widens that deviation.
    """

    def __call__(self, rewards: Tensor) -> Tensor:
        self.update(rewards)
        return (rewards / self.std()).clamp(-self.clip, self.clip)

    def std(self) -> float:
        return self.deviation_around(self.sum / self.count)
