"""Scales the rewards of the responses to a prompt so that only their differences count."""

import torch
from torch import Tensor


class RewardScaler:
    """Divides rewards by a running standard deviation and bounds them, both on the differences of pairs by default.

    `mode="difference"`: rewards become their distance from the prompt's mean, divided by the standard deviation of all
    differences so far and kept within ±clip/2, so that no difference exceeds `clip`. For two responses that is ±d/2
    with d = clip((r1 - r2) / std). Responses are exchangeable, so the mean difference is zero and the deviation is the
    root mean square. A reward shifted per prompt gives the same.
    `mode="absolute"`: each reward is divided by the standard deviation of all rewards so far and clipped, as in the
    first author's code. A shift per prompt widens that deviation, so the update is no longer invariant.
    `mode="none"`: rewards are only clipped, on their differences.
    """

    def __init__(self, mode: str, clip: float):
        self.mode = mode
        self.clip = clip if clip > 0 else float("inf")
        self.count = 0
        self.sum = 0.0
        self.sum_of_squares = 0.0

    def __call__(self, rewards: Tensor, seen: Tensor | None = None) -> Tensor:
        """Scales rewards [P, K] fp32, after taking `seen` [P', K] (default: the same) into the running statistics.

        `seen` holds the rewards of all processes where there are several.
        """
        self.update(rewards if seen is None else seen)
        if self.mode == "absolute":
            return (rewards / self.std()).clamp(-self.clip, self.clip)
        # Differences first: they are exact where a shift is not.
        below_first = rewards[:, :1] - rewards
        centred = below_first.mean(dim=1, keepdim=True) - below_first
        return (centred / self.std()).clamp(-self.clip / 2, self.clip / 2)

    def update(self, rewards: Tensor) -> None:
        values = (rewards if self.mode == "absolute" else differences(rewards)).double()
        self.count += values.numel()
        self.sum += values.sum().item()
        self.sum_of_squares += values.square().sum().item()

    def std(self) -> float:
        if self.mode == "none":
            return 1.0
        mean = self.sum / self.count if self.mode == "absolute" else 0.0
        variance = self.sum_of_squares / self.count - mean**2
        return max(variance, 0.0) ** 0.5 or 1.0

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "sum": self.sum, "sum_of_squares": self.sum_of_squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        vars(self).update(state)


def differences(rewards: Tensor) -> Tensor:
    """r_i − r_j of all pairs i < j of a prompt's responses, [P, K] -> [P, K (K − 1) / 2]."""
    first, second = torch.triu_indices(*2 * rewards.shape[1:], offset=1)
    return rewards[:, first] - rewards[:, second]
