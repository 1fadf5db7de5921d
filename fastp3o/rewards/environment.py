"""The rewards that environments give for a trajectory's turns, for `--reward environment`."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fastp3o.rollouts.groups import AtTokens, Group, Response


class EnvironmentReward:
    """The weighted sum of the rewards of all turns. weights: by the names of the rewards. passes:
    whether a trajectory without any is left to the next reward of a cascade, as NaN.
    """

    def __init__(self, weights: Mapping[str, float], *, passes: bool = False):
        self.weights, self.passes = weights, passes

    def __call__(self, groups: list[Group]) -> Tensor:
        parts = self.parts(groups)
        values = torch.stack([weight * parts[name] for name, weight in self.weights.items()]).sum(0)
        if not self.passes:
            return values

        def has_reward(response: Response) -> bool:
            return any(turn.rewards for turn in response.turns)

        rewarded = torch.tensor([list(map(has_reward, group.responses)) for group in groups])
        return values.masked_fill(~rewarded, torch.nan)

    def at_tokens(self, groups: list[Group]) -> Iterator[AtTokens]:
        """A turn's rewards come at its end."""
        for p, group in enumerate(groups):
            for k, response in enumerate(group.responses):
                ends = np.cumsum([turn.end - turn.start for turn in response.turns], dtype=np.int64)
                sums = [
                    sum(self.weights[name] * turn.rewards[name] for name in turn.rewards)
                    for turn in response.turns
                ]
                yield AtTokens(p, k, np.maximum(ends - 1, 0), np.array(sums, dtype=np.float64))

    def parts(self, groups: list[Group]) -> dict[str, Tensor]:
        """The sums over turns of each reward, unweighted, [P, K] fp32."""

        def total(name: str, response: Response) -> float:
            return sum(turn.rewards.get(name, 0.0) for turn in response.turns)

        tables = {}
        for name in self.weights:
            sums = [[total(name, response) for response in group.responses] for group in groups]
            tables[name] = torch.tensor(sums, dtype=torch.float32)
        return tables
