"""Dynamic sampling (DAPO, arXiv 2503.14476): a group of equal rewards teaches nothing, so it is sampled again."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from fastp3o.rewards.scaling import tied
from fastp3o.rollouts.rollouts import Rollouts
from fastp3o.training.order import process_share

Scores = dict[str, Tensor]


@dataclass(frozen=True)
class DynamicSampling:
    """Replaces the responses to each prompt whose rewards are all equal, until they are not, or `attempts` times.

    sample: rollouts of an update's prompts with these numbers, other ones in each attempt, which are counted from 1.
    score: their `reward`, and what it is made of, [P, K] each.
    """

    accelerator: Accelerator
    sample: Callable[[int, list[int], int], Rollouts]
    score: Callable[[Rollouts], Scores]
    attempts: int

    def __call__(self, update: int, rollouts: Rollouts, scores: Scores) -> tuple[Rollouts, Scores, int]:
        """Rollouts and scores of all processes, the same on each, as those given; and how often a prompt was sampled
        again.
        """
        count = 0
        for attempt in range(1, self.attempts + 1):
            rewards = scores["reward"]
            again = tied(rewards).nonzero().flatten().tolist()
            if not again:
                break
            count += len(again)
            # Processes wait for one another in passes, so each takes part: with a prompt of another's, if need be.
            share = process_share(again, self.accelerator) or again[:1]
            fresh = self.sample(update, share, attempt)
            fresh_scores = {name: values.cpu() for name, values in self.score(fresh).items()}
            for numbers, others, of_others in gather_object([(share, fresh, fresh_scores)]):
                rollouts = rollouts.with_prompts(numbers, others)
                at = torch.tensor(numbers, device=rewards.device)
                scores = {name: own.index_copy(0, at, of_others[name].to(own)) for name, own in scores.items()}
        return rollouts, scores, count
