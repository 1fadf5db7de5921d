"""Dynamic sampling (DAPO, arXiv 2503.14476): a group of equal rewards teaches nothing, so it is sampled again."""

from collections.abc import Callable
from dataclasses import dataclass

from accelerate import Accelerator

from fastp3o.packing.share import process_share
from fastp3o.rewards.scaling import tied
from fastp3o.rollouts.groups import Group
from fastp3o.training.microbatches import Rewards, gather_groups


@dataclass(frozen=True)
class DynamicSampling:
    """Replaces each group whose rewards are all equal, until they are not, or `attempts` times.

    sample: new responses to an update's prompts with these numbers; the last argument counts attempts from 1. score:
    the groups' rewards.
    """

    accelerator: Accelerator
    sample: Callable[[int, list[int], int], list[Group]]
    score: Callable[[list[Group]], Rewards]
    attempts: int

    def __call__(self, update: int, groups: list[Group], rewards: Rewards) -> tuple[list[Group], Rewards, int]:
        """Groups and rewards of all processes, the same on each, as those given; and how often a prompt was sampled
        again.
        """
        groups, rewards = list(groups), {name: table.clone() for name, table in rewards.items()}
        count = 0
        for attempt in range(1, self.attempts + 1):
            again = tied(rewards["reward"]).nonzero().flatten().tolist()
            if not again:
                break
            count += len(again)
            # Processes wait for one another in passes, so one that has no prompt left samples another's.
            share = process_share(again, self.accelerator) or again[:1]
            own = self.sample(update, share, attempt)
            fresh, fresh_rewards = gather_groups(self.accelerator, own, self.score(own))
            for place, group in enumerate(fresh):
                groups[group.prompt.number] = group
                for name, table in rewards.items():
                    table[group.prompt.number] = fresh_rewards[name][place]
        return groups, rewards, count
