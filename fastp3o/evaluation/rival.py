"""Progress without scores: a policy's responses to the prompts of evaluations against those of a
rival.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from fastp3o.rewards.reward import Reward, WeightedSum
from fastp3o.rewards.rivals import AgainstRival, compares
from fastp3o.rollouts.groups import Response


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
    rewards: Mapping[str, Reward], values: Mapping[str, Tensor], rivals: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """P(a response is better than the rival's), [P, K] fp32, NaN without a verdict, by the metrics
    whose means they are. A reward that compares says it; of scores and of sums the higher total is
    better, and equal ones are a tie.

    rewards: of `against_rivals`. values: of the last call, [P, K] each. rivals: the rival's own, as
    many or more a prompt.
    """
    tables: dict[str, Tensor] = {}
    for name, reward in rewards.items():
        prefix = "" if name == "reward" else f"{name}/"
        if isinstance(reward, AgainstRival):
            tables[f"{prefix}win_rate"] = reward.preferred
            continue
        leads = values[name] - rivals[name][:, : values[name].shape[1]]
        tables[f"{prefix}win_rate"] = (leads.sign() + 1) / 2
        parts = reward.rewards if isinstance(reward, WeightedSum) else {}
        tables |= {
            f"{prefix}win_rate/{part}": single.preferred
            for part, single in parts.items()
            if isinstance(single, AgainstRival)
        }
    return tables
