"""Rewards that compare, in evaluations: against a rival's responses, where a response has no
siblings.
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch
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
    without a verdict. longer: by how many characters it is longer than its rival, or the mean of
    its rivals, [P, K] fp32.
    """

    preferred: Tensor
    longer: Tensor

    def __init__(
        self,
        reward: RelativeReward | FunctionReward,
        rivals: Sequence[Sequence[Response]],
        siblings: int,
    ):
        self.reward, self.rivals, self.siblings = reward, rivals, siblings

    def __call__(self, groups: list[Group]) -> Tensor:
        if isinstance(self.reward, RelativeReward):
            return self.by_pairs(self.reward, groups)
        return self.among_siblings(self.reward, groups)

    def by_pairs(self, reward: RelativeReward, groups: list[Group]) -> Tensor:
        """Compares each prompt's k-th response with the rival's k-th."""
        comparisons = []
        for (prompt, responses), rivals in zip(groups, self.rivals, strict=True):
            for place, (response, rival) in enumerate(zip(responses, rivals, strict=False)):
                comparisons.append(Comparison(prompt, response, rival, (place, None)))
        self.preferred = reward.preferred(comparisons).view(len(groups), -1)
        self.longer = longer_than(groups, self.rivals)
        return (self.preferred - 0.5).nan_to_num(nan=0.0)

    def among_siblings(self, reward: FunctionReward, groups: list[Group]) -> Tensor:
        """Asks for the rewards of each response among the rival's as its siblings."""
        asked = []
        for (prompt, responses), rivals in zip(groups, self.rivals, strict=True):
            siblings = rivals[: self.siblings]
            asked += [Group(prompt, [response, *siblings]) for response in responses]
        values = reward(asked)
        leads = values[:, :1] - values[:, 1:]
        wins = (leads.sign() + 1) / 2
        text_lengths = characters([group.responses for group in asked])
        self.preferred = wins.mean(dim=1).view(len(groups), -1)
        self.longer = (text_lengths[:, 0] - text_lengths[:, 1:].mean(dim=1)).view(len(groups), -1)
        return leads.mean(dim=1).view(len(groups), -1)


def longer_than(groups: Sequence[Group], rivals: Sequence[Sequence[Response]]) -> Tensor:
    """By how many characters each prompt's k-th response is longer than the rival's k-th, [P, K]
    fp32. rivals: [P], K or more each.
    """
    return characters([its for _, its in groups]) - characters(
        [others[: len(its)] for (_, its), others in zip(groups, rivals, strict=True)]
    )


def characters(responses: Sequence[Sequence[Response]]) -> Tensor:
    """The length of each response's text, [P, K] fp32."""
    return torch.tensor([[len(response.text) for response in its] for its in responses]).float()


def compares(reward: object) -> TypeGuard[RelativeReward | FunctionReward]:
    """Whether a reward says nothing of a response alone."""
    return isinstance(reward, RelativeReward) or (
        isinstance(reward, FunctionReward) and reward.compares_siblings
    )
