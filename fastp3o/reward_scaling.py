"""Scales the rewards of pairs so that only their differences count."""

import torch
from torch import Tensor


class RewardScaler:
    """Divides rewards by a running standard deviation and bounds them, both on the differences of pairs by default.

    `mode="difference"`: rewards become ±d/2 with d = clip((r1 - r2) / std of all differences so far). The two responses
    are exchangeable, so the mean difference is zero and the deviation is the root mean square. A reward shifted per
    prompt gives the same d.
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
        """Scales rewards [P, 2] fp32, after taking `seen` [P', 2] (default: the same) into the running statistics.

        `seen` holds the pairs of all processes where there are several.
        """
        self.update(rewards if seen is None else seen)
        if self.mode == "absolute":
            return (rewards / self.std()).clamp(-self.clip, self.clip)
        difference = ((rewards[:, 0] - rewards[:, 1]) / self.std()).clamp(-self.clip, self.clip)
        return torch.stack([difference / 2, -difference / 2], dim=1)

    def update(self, rewards: Tensor) -> None:
        values = (rewards if self.mode == "absolute" else rewards[:, 0] - rewards[:, 1]).double()
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
