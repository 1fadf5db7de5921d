"""How much of a reward is an offset per prompt: what a prompt's responses share, which no
comparison of them can see.

P3O follows differences of rewards, so an offset changes nothing for it; an algorithm with a critic
must learn it first. The estimate is that of an analysis of variance with random effects (Searle,
Casella and McCulloch, 1992, chapter 3).
"""

from typing import NamedTuple

from torch import Tensor


class Spread(NamedTuple):
    """Standard deviations of a reward. within: between responses to one prompt. offset: between
    prompts, of the mean that infinitely many responses to each would have; 0 where the means differ
    no more than the responses explain.
    """

    within: float
    offset: float

    @property
    def ratio(self) -> float:
        """Offsets in units of the spread within a prompt: infinite where only offsets differ, NaN
        if nothing does.
        """
        if self.within == 0:
            return float("inf") if self.offset > 0 else float("nan")
        return self.offset / self.within


def spread(rewards: Tensor) -> Spread | None:
    """rewards: [P, K], of K responses to each of P prompts. None for a single prompt or single
    responses, which cannot be told apart.
    """
    P, K = rewards.shape
    if P < 2 or K < 2:
        return None
    rewards = rewards.double()
    within = rewards.var(dim=1).mean()
    # The mean of K responses varies by within / K where prompts do not differ.
    offset = (rewards.mean(dim=1).var() - within / K).clamp(min=0)
    return Spread(float(within.sqrt()), float(offset.sqrt()))
