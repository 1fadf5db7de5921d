"""Rewards that compare, in evaluations: against a rival's responses, where a response has no
siblings.
"""

from collections.abc import Sequence
from typing import TypeGuard

from torch import Tensor

from fastp3o.rewards.comparisons import Comparison, RelativeReward
from fastp3o.rewards.function import FunctionReward
from fastp3o.rollouts.groups import Group, Response


class AgainstRival:
    """P(the response is better than the rival's) − 1/2 as its reward, [P, K] fp32, 0 without a
    verdict. A prompt's k-th response meets the rival's k-th. Of a function that compares siblings:
    the response's number less the mean of its rivals', of which a prompt has as many as in training
    a response has siblings.

    rivals: of each prompt that evaluations have, in order, K or more. siblings: how many of them
    are a response's. preferred: P(the response is better) in the last call, [P, K] fp32, NaN
    without a verdict.
    """

    preferred: Tensor

    def __init__(
        self,
        reward: RelativeReward | FunctionReward,
        rivals: Sequence[Sequence[Response]],
        siblings: int,
    ):
        self.reward, self.rivals, self.siblings = reward, rivals, siblings

    def __call__(self, groups: list[Group]) -> Tensor:
        if isinstance(self.reward, RelativeReward):
            comparisons = [
                Comparison(prompt, response, rival, (place, None))
                for (prompt, responses), its in zip(groups, self.rivals, strict=True)
                for place, (response, rival) in enumerate(zip(responses, its, strict=False))
            ]
            self.preferred = self.reward.preferred(comparisons).view(len(groups), -1)
            return (self.preferred - 0.5).nan_to_num(nan=0.0)
        among = [
            Group(prompt, [response, *its[: self.siblings]])
            for (prompt, responses), its in zip(groups, self.rivals, strict=True)
            for response in responses
        ]
        values = self.reward(among)
        leads = values[:, :1] - values[:, 1:]
        self.preferred = ((leads.sign() + 1) / 2).mean(dim=1).view(len(groups), -1)
        return leads.mean(dim=1).view(len(groups), -1)


def compares(reward: object) -> TypeGuard[RelativeReward | FunctionReward]:
    """Whether a reward says nothing of a response alone."""
    return isinstance(reward, RelativeReward) or (
        isinstance(reward, FunctionReward) and reward.compares_siblings
    )
