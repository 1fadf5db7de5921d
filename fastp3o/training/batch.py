"""What one update of the online loop works on: groups of responses with their rewards, the same on
every process.
"""

from dataclasses import dataclass
from typing import Self

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from fastp3o.rewards.reward import PAIR_REWARDS, TOKEN_REWARDS
from fastp3o.rollouts.groups import Group

Rewards = dict[str, Tensor]  # tables [P, K] fp32 on the CPU by name; `reward` is what is maximized


@dataclass(frozen=True)
class RolloutBatch:
    """P prompts with K responses each, and their rewards.

    groups: in the order of their prompts' numbers. rewards: unscaled, less penalties; the penalties
    and the parts of a sum are there, too. token_rewards: [P, K, L] fp32 on the CPU, of each
    response's first tokens; None where a reward comes at a response's last token alone.
    pair_rewards: [P, K, K] fp32 on the CPU, by how much the first of a pair is better, where a
    reward compares responses; None where all of them score. sampled_again: how often
    `RolloutBuffer.resampled` sampled a prompt again.
    """

    groups: list[Group]
    rewards: Rewards
    token_rewards: Tensor | None = None
    pair_rewards: Tensor | None = None
    sampled_again: int = 0

    @classmethod
    def gathered(cls, accelerator: Accelerator, groups: list[Group], rewards: Rewards) -> Self:
        """The groups and rewards of all processes. rewards: with the tables TOKEN_REWARDS and
        PAIR_REWARDS, if tokens have rewards and if a reward compares.
        """
        if accelerator.num_processes > 1:
            # What only rewards read is not sent.
            sent = [
                Group(group.prompt._replace(columns={}, given=""), group.responses)
                for group in groups
            ]
            shares = gather_object([(sent, rewards)])
            groups = [group for share, _ in shares for group in share]
            order = sorted(range(len(groups)), key=lambda place: groups[place].prompt.number)
            rewards = {
                name: torch.cat([table[name] for _, table in shares])[order] for name in rewards
            }
            groups = [groups[place] for place in order]
        by_response = {
            name: table
            for name, table in rewards.items()
            if name not in (TOKEN_REWARDS, PAIR_REWARDS)
        }
        return cls(groups, by_response, rewards.get(TOKEN_REWARDS), rewards.get(PAIR_REWARDS))
