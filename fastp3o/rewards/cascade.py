"""Rewards that stand in for one another: rules first, then a model, then a judge."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fastp3o.calls.endpoint import EndpointError
from fastp3o.calls.function import FunctionError, FunctionInterruptedError
from fastp3o.rewards.model import ModelReward
from fastp3o.rollouts.groups import Group


class Cascade:
    """Each reward answers for the responses that those before it have passed on, which are NaN in
    their answers. rewards: by name. The last one passes nothing on. answered: of each reward, [P,
    K] fp32 of the last call, 1 where it has answered.
    """

    def __init__(self, rewards: Mapping[str, Callable[[list[Group]], Tensor]]):
        self.rewards = rewards
        self.answered: dict[str, Tensor] = {}

    def __call__(self, groups: list[Group]) -> Tensor:
        """Raises as the rewards do, once all models have had their pass: processes make it
        together.
        """
        values = torch.full((len(groups), len(groups[0].responses)), torch.nan)
        failure: EndpointError | FunctionError | FunctionInterruptedError | None = None
        for name, reward in self.rewards.items():
            left = values.isnan()
            try:
                if isinstance(reward, ModelReward):
                    values = values.where(~left, reward(groups))
                elif left.any() and failure is None:
                    places = left.nonzero().tolist()
                    asked = [Group(groups[p].prompt, [groups[p].responses[k]]) for p, k in places]
                    values[left] = reward(asked).flatten()
            except (EndpointError, FunctionError, FunctionInterruptedError) as error:
                failure = failure or error
            self.answered[name] = (left & ~values.isnan()).float()
        if failure is not None:
            raise failure
        return values
