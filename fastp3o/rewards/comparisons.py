"""Relative rewards: comparisons of the responses to one prompt, in place of scores.

P prompts with K responses each. D [P, K, K] has P(response i is better than response j) − 1/2,
within −1/2 and 1/2: it is skew-symmetric, and 0 on the diagonal, for a tie and where nothing has
compared the two. Differences of scores are the case without circles; comparisons may have some (a
beats b, b beats c, c beats a), which no score has.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from fastp3o.rewards.config import Compared
from fastp3o.rollouts.groups import Group, Prompt, Response


class Comparison(NamedTuple):
    """Two responses to a prompt, of which one may be better. places: of both among the prompt's
    responses; an anchor or a rival has none.
    """

    prompt: Prompt
    first: Response
    second: Response
    places: tuple[int, int | None] = (0, None)

    def __str__(self) -> str:
        first, second = self.places
        other = "another model's" if second is None else f"response {second + 1}"
        return f"response {first + 1} and {other} to {self.prompt.text!r:.80}"


class RelativeReward(ABC):
    """A reward that compares the responses to a prompt with one another, and has no score of one
    alone. together: whether processes compute it together, so that each asks for all of its
    responses. compared: D of the last call.
    """

    together: bool = False
    compared: Tensor

    @abstractmethod
    def matrix(self, groups: list[Group]) -> Tensor:
        """D [P, K, K] fp32 on the CPU."""

    def preferred(self, comparisons: list[Comparison]) -> Tensor:
        """P(the first is better), [n] fp32 on the CPU; NaN where there is no verdict."""
        pairs = [Group(prompt, [first, second]) for prompt, first, second, _ in comparisons]
        return self.matrix(pairs)[:, 0, 1] + 0.5

    def __call__(self, groups: list[Group]) -> Tensor:
        """Each response's row mean, [P, K] fp32, as its score among its siblings."""
        self.compared = self.matrix(groups)
        return row_means(self.compared)


class JudgedPairs(RelativeReward):
    """Asks which response of a pair is better, and makes D of the verdicts. Responses of the same
    text are a tie, and nobody is asked.

    judged: which pairs are. anchor: samples a response to each prompt that all of its others are
        compared with.
    answered: the share of each response's comparisons that had a verdict in the last call, [P, K]
    fp32.
    """

    judged: Compared = "all"
    anchor: Callable[[list[Prompt]], list[Response]] | None = None
    answered: Tensor

    @abstractmethod
    def ask(self, comparisons: list[Comparison]) -> list[float]:
        """P(the first is better) of each, within 0 and 1; NaN where there is no verdict."""

    def preferred(self, comparisons: list[Comparison]) -> Tensor:
        asked = [self.together or one.first.text != one.second.text for one in comparisons]
        answers = iter(
            self.ask([one for one, is_asked in zip(comparisons, asked, strict=True) if is_asked])
        )
        values = [next(answers) if is_asked else 0.5 for is_asked in asked]
        same = torch.tensor(
            [one.first.text == one.second.text for one in comparisons], dtype=torch.bool
        )
        return torch.tensor(values, dtype=torch.float32).masked_fill(same, 0.5)

    def matrix(self, groups: list[Group]) -> Tensor:
        responses = len(groups[0].responses)
        if self.anchor is not None:
            anchors = self.anchor([group.prompt for group in groups])
            preferred = self.preferred(against(groups, [[one] for one in anchors])).view(
                -1, responses
            )
            self.answered = (~preferred.isnan()).float()
            return matrix_from_anchor(preferred)
        pairs = judged_pairs(self.judged, responses)
        preferred = self.preferred(
            [Comparison(prompt, its[i], its[j], (i, j)) for prompt, its in groups for i, j in pairs]
        ).view(-1, len(pairs))
        self.answered = answered_shares(preferred, pairs, responses)
        return matrix_from_pairs(preferred, pairs, responses)


class ComparisonCascade(JudgedPairs):
    """Each reward judges the pairs for which those before it have no verdict. answered_by: the
    share of the last call's comparisons that each reward has decided.
    """

    def __init__(self, rewards: Mapping[str, RelativeReward]):
        self.rewards = rewards
        self.together = any(reward.together for reward in rewards.values())
        self.answered_by: dict[str, float] = {}

    def ask(self, comparisons: list[Comparison]) -> list[float]:
        values = torch.full((len(comparisons),), nan)
        for name, reward in self.rewards.items():
            left = values.isnan()
            places = (
                range(len(comparisons)) if reward.together else left.nonzero().flatten().tolist()
            )
            answers = torch.full_like(values, nan)
            if places:
                answers[list(places)] = reward.preferred([comparisons[place] for place in places])
            self.answered_by[name] = (
                (left & ~answers.isnan()).float().mean().item() if comparisons else 0.0
            )
            values = values.where(~left, answers)
        return values.tolist()


def against(groups: Sequence[Group], rivals: Sequence[Sequence[Response]]) -> list[Comparison]:
    """Comparisons of each response with each of its rivals, [P][R]: P K R, those of a response next
    to each other.
    """
    return [
        Comparison(prompt, response, rival, (place, None))
        for (prompt, responses), others in zip(groups, rivals, strict=True)
        for place, response in enumerate(responses)
        for rival in others
    ]


class Knockout:
    """How many rounds each response survives, [P, K] fp32, as its reward: winners of neighbors meet
    until one is left, in K − 1 comparisons a prompt. Responses are in no order but that of
    sampling. After a tie, and without a verdict, the first of the two goes on; so does an odd one
    out.
    """

    def __init__(self, reward: RelativeReward):
        self.reward, self.together = reward, reward.together

    def __call__(self, groups: list[Group]) -> Tensor:
        left = [list(range(len(group.responses))) for group in groups]
        rounds = torch.zeros(len(groups), len(groups[0].responses))
        while len(left[0]) > 1:
            # The matches of all prompts are asked about at once.
            matches = [[*zip(its[::2], its[1::2], strict=False)] for its in left]
            answers = self.reward.preferred(
                [
                    Comparison(group.prompt, group.responses[i], group.responses[j], (i, j))
                    for group, of_group in zip(groups, matches, strict=True)
                    for i, j in of_group
                ]
            )
            preferred = iter(answers.tolist())
            for place, its in enumerate(left):
                go_on = [j if next(preferred) < 0.5 else i for i, j in matches[place]]
                if len(its) % 2:
                    go_on.append(its[-1])
                left[place] = go_on
                rounds[place, go_on] += 1
        return rounds


# --- which pairs are judged, and what becomes of the verdicts -------------------------------------


def judged_pairs(judged: Compared, responses: int) -> list[tuple[int, int]]:
    """The pairs of K responses that are compared: all K (K − 1) / 2, or each response with the next
    one in a circle, K. Two responses are one pair.
    """
    if judged == "all" or responses == 2:
        return list(combinations(range(responses), 2))
    return [(place, (place + 1) % responses) for place in range(responses)]


def matrix_from_pairs(
    preferred: Tensor, pairs: Sequence[tuple[int, int]], responses: int
) -> Tensor:
    """D [P, K, K]. preferred: P(the first of a pair is better), [P, M], of the M pairs; NaN where
    there is no verdict, which counts for nothing.
    """
    first, second = torch.tensor(pairs).T
    leads = (preferred.float() - 0.5).nan_to_num(nan=0.0)
    matrix = torch.zeros(len(preferred), responses, responses)
    matrix[:, first, second], matrix[:, second, first] = leads, -leads
    return matrix


def matrix_from_anchor(preferred: Tensor) -> Tensor:
    """D [P, K, K] of responses that are compared with one anchor alone: half the difference of two
    responses' leads over it, so that D stays within −1/2 and 1/2. preferred: P(response i is better
    than the anchor), [P, K]; a response without a verdict, NaN, is taken for no better and no worse
    than any other.
    """
    leads = preferred.float() - 0.5
    return ((leads[:, :, None] - leads[:, None, :]) / 2).nan_to_num(nan=0.0)


def row_means(matrix: Tensor) -> Tensor:
    """Scores s_i = mean_j D_ij, [P, K, K] -> [P, K], the diagonal's 0 included: s_i − s_j is D_ij
    to the bit for K = 2, and for any K where D_ij is a difference of scores. Without clipping,
    P3O's gradient is that of D itself.
    """
    return matrix.mean(2)


def answered_shares(preferred: Tensor, pairs: Sequence[tuple[int, int]], responses: int) -> Tensor:
    """[P, M] -> the share of each response's pairs that have a verdict, [P, K] fp32."""
    takes_part = torch.tensor(
        [[place in pair for place in range(responses)] for pair in pairs]
    ).float()
    return (~preferred.isnan()).float() @ takes_part / takes_part.sum(0)
