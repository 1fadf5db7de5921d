"""Relative rewards: comparisons of the responses to one prompt, in the place of scores.

P prompts with K responses each. D [P, K, K] has P(response i is better than response j) − 1/2, within −1/2 and 1/2: it is
skew-symmetric, and 0 on the diagonal, for a tie and where nothing has compared the two. Differences of scores are the
case without circles; comparisons may have some (a beats b, b beats c, c beats a), which no score has.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

from fastp3o.rollouts.groups import Group

Judged = Literal["all", "circular", "anchor"]


class RelativeReward(ABC):
    """A reward that compares the responses to a prompt with one another, and has no score of one alone."""

    @abstractmethod
    def matrix(self, groups: list[Group]) -> Tensor:
        """D [P, K, K] fp32 on the CPU."""

    def __call__(self, groups: list[Group]) -> Tensor:
        """Each response's row mean, [P, K] fp32, as its score among its siblings."""
        return row_means(self.matrix(groups))

    def against(self, groups: list[Group], rivals: list[Group]) -> Tensor:
        """P(the response is better than the rival's) − 1/2, [P, K] fp32. rivals: groups of the same prompts, of which
        the first response counts. Evaluations read it, where a response has no siblings.
        """
        pairs = [
            Group(group.prompt, [response, rival.responses[0]])
            for group, rival in zip(groups, rivals, strict=True)
            for response in group.responses
        ]
        return self.matrix(pairs)[:, 0, 1].view(len(groups), -1)


# --- which pairs are judged, and what becomes of the verdicts ---------------------------------------------------------


def judged_pairs(judged: Judged, responses: int) -> list[tuple[int, int]]:
    """The pairs of K responses that are compared: all K (K − 1) / 2, or each response with the next one in a circle, K.
    Those of an anchor are each response and the anchor, which is none of them.
    """
    if judged == "all" or responses == 2:
        return list(combinations(range(responses), 2))
    return [(place, (place + 1) % responses) for place in range(responses)]


def matrix_from_pairs(preferred: Tensor, pairs: Sequence[tuple[int, int]], responses: int) -> Tensor:
    """D [P, K, K]. preferred: P(the first of a pair is better), [P, M], of the M pairs; NaN where there is no verdict,
    which counts for nothing.
    """
    first, second = torch.tensor(pairs).T
    leads = (preferred.float() - 0.5).nan_to_num(nan=0.0)
    matrix = torch.zeros(len(preferred), responses, responses)
    matrix[:, first, second], matrix[:, second, first] = leads, -leads
    return matrix


def matrix_from_anchor(preferred: Tensor) -> Tensor:
    """D [P, K, K] of responses that are compared with one anchor alone: half the difference of two responses' leads over
    it, so that D stays within −1/2 and 1/2. preferred: P(response i is better than the anchor), [P, K]; a response
    without a verdict, NaN, is taken for no better and no worse than any other.
    """
    leads = preferred.float() - 0.5
    return ((leads[:, :, None] - leads[:, None, :]) / 2).nan_to_num(nan=0.0)


def row_means(matrix: Tensor) -> Tensor:
    """Scores s_i = mean_j D_ij, [P, K, K] -> [P, K], the diagonal's 0 included: s_i − s_j is D_ij to the bit for K = 2,
    and for any K where D_ij is a difference of scores. Without clipping, P3O's gradient is that of D itself.
    """
    return matrix.mean(2)
