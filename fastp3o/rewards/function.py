"""A user's Python function of texts as a reward."""

from numbers import Real

import torch
from torch import Tensor

from fastp3o.named_function import call_for_list, import_function
from fastp3o.rollouts.rollouts import Rollouts


class FunctionReward:
    """`function(prompts: list[str], responses: list[str]) -> list[float]`, given as `module:function`.

    It sees the P K responses one after the other, each beside its prompt.
    """

    def __init__(self, name: str):
        self.name = name
        self.function = import_function(name, "reward function")

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """[P, K] fp32. Raises ValueError where the function does not return one number for each response."""
        rewards = [
            self.number(reward, index)
            for index, reward in enumerate(call_for_list(self.function, self.name, *rollouts.texts()))
        ]
        return torch.tensor(rewards, dtype=torch.float32).view(len(rollouts), -1)

    def number(self, reward: object, index: int) -> float:
        """Text is no number, even if it reads like one."""
        if isinstance(reward, Tensor) and reward.numel() == 1:
            reward = reward.item()
        if not isinstance(reward, Real):
            raise ValueError(f"{self.name}: reward {index} must be a number, got {reward!r:.80}")
        try:
            return float(reward)
        except OverflowError as error:
            raise ValueError(f"{self.name}: reward {index} must be a number of fp32, got a larger one") from error
