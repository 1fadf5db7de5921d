"""A user's Python function of texts as a reward."""

import torch
from torch import Tensor

from fastp3o.named_function import import_function
from fastp3o.rollouts.rollouts import Rollouts


class FunctionReward:
    """`function(prompts: list[str], responses: list[str]) -> list[float]`, given as `module:function`.

    It sees the P K responses one after the other, each beside its prompt.
    """

    def __init__(self, name: str):
        self.name = name
        self.function = import_function(name, "reward function")

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """[P, K] fp32. Raises ValueError where the function returns another number of rewards."""
        prompts, responses = rollouts.texts()
        rewards = [float(reward) for reward in self.function(prompts, responses)]
        if len(rewards) != len(responses):
            raise ValueError(f"{self.name} returned {len(rewards)} rewards for {len(responses)} responses")
        return torch.tensor(rewards, dtype=torch.float32).view(len(rollouts), -1)
