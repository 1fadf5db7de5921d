"""The groups of an update that are logged, as plain values."""

import hashlib
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from fastp3o.packing.on_device import to_device
from fastp3o.rollouts.groups import Group
from fastp3o.run.log import LoggedGroup, LoggedResponse, finite_or_none
from fastp3o.training.microbatches import Rewards


def chosen_prompts(texts: Sequence[str], count: int) -> list[int]:
    """Places of the prompts of an update that are logged, in order. count: of them; 0: all.

    Those with the smallest hashes are taken, so that a prompt that is logged in one epoch tends to be in the next.
    """
    places = range(len(texts))
    if not count:
        return list(places)
    return sorted(sorted(places, key=lambda place: hashlib.sha256(texts[place].encode()).digest())[:count])


def gather_table(accelerator: Accelerator, prompts: int, places: Sequence[int], values: Tensor) -> Tensor:
    """A table of all prompts, [P, K], from this process's rows of it. All are on the CPU.

    places: of this process's prompts; each prompt is one process's. values: theirs, [p, K] fp32.
    """
    table = torch.zeros(prompts, values.shape[1])
    table[list(places)] = values
    if accelerator.num_processes == 1:
        return table
    # Each sum has one term that is not 0, and is exact.
    return accelerator.reduce(to_device(table, accelerator.device), reduction="sum").cpu()


def logged_groups(
    step: int, places: Sequence[int], groups: Sequence[Group], rewards: Rewards, log_ratios: Tensor, own: int
) -> list[LoggedGroup]:
    """Groups at these places. log_ratios: [P, K]. own: number of a prompt's responses that are the policy's; 0: none,
    and the KL is over all.
    """
    tables = {name: table.tolist() for name, table in rewards.items()}
    ratios, kls = log_ratios.tolist(), log_ratios[:, : own or None].mean(dim=1).tolist()
    return [
        LoggedGroup(
            step,
            groups[place].prompt.text,
            finite_or_none(kls[place]),
            [
                LoggedResponse(
                    text=response.text,
                    ids=list(response.ids),
                    reward=tables["reward"][place][k],
                    parts={name: finite_or_none(table[place][k]) for name, table in tables.items() if name != "reward"},
                    log_ratio=finite_or_none(ratios[place][k]),
                    finished=response.finished,
                )
                for k, response in enumerate(groups[place].responses)
            ],
        )
        for place in places
    ]
