"""Progress without scores: a policy's responses to the prompts of evaluations against those of a
rival.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from fastp3o.rewards.reward import Reward, WeightedSum
from fastp3o.rewards.rivals import AgainstRival, compares, longer_than
from fastp3o.rollouts.groups import Group, Response


class Rival(NamedTuple):
    """The rival's responses to a process's prompts of evaluations, [P][R], and the values of all
    rewards for the first K of them, [P, K] fp32 each.
    """

    responses: Sequence[Sequence[Response]]
    values: Mapping[str, Tensor]


class Preferences(NamedTuple):
    """P(a response is better than the rival's), NaN without a verdict, and by how many characters
    it is longer, [P, K] fp32 each.
    """

    preferred: Tensor
    longer: Tensor


def against_rivals(
    rewards: Mapping[str, Reward], rivals: Sequence[Sequence[Response]], siblings: int
) -> dict[str, Reward]:
    """The rewards of evaluations, in which those that compare do so with these rivals: arguments of
    AgainstRival.
    """

    def replaced(reward: Reward) -> Reward:
        if isinstance(reward, WeightedSum):
            return WeightedSum(
                {name: replaced(part) for name, part in reward.rewards.items()}, reward.weights
            )
        return AgainstRival(reward, rivals, siblings) if compares(reward) else reward

    return {name: replaced(reward) for name, reward in rewards.items()}


def preferences(
    rewards: Mapping[str, Reward],
    values: Mapping[str, Tensor],
    groups: Sequence[Group],
    rival: Rival,
) -> dict[str, Preferences]:
    """Whose responses are better, by the metrics whose means they are. A reward that compares says
    it; of scores and of sums the higher total is better, and equal ones are a tie.

    rewards: of `against_rivals`. values: of the last call, [P, K] each. groups: that it was about.
    The rival has as many responses a prompt or more.
    """
    tables: dict[str, Preferences] = {}
    for name, reward in rewards.items():
        prefix = "" if name == "reward" else f"{name}/"
        if isinstance(reward, AgainstRival):
            tables[f"{prefix}win_rate"] = Preferences(reward.preferred, reward.longer)
            continue
        leads = values[name] - rival.values[name][:, : values[name].shape[1]]
        tables[f"{prefix}win_rate"] = Preferences(
            (leads.sign() + 1) / 2, longer_than(groups, rival.responses)
        )
        parts = reward.rewards if isinstance(reward, WeightedSum) else {}
        tables |= {
            f"{prefix}win_rate/{part}": Preferences(single.preferred, single.longer)
            for part, single in parts.items()
            if isinstance(single, AgainstRival)
        }
    return tables
