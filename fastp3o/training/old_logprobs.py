"""Where the log-probs that ratios compare with come from: a pass of the policy, the loss itself, or
what sampled.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel
from fastp3o.objectives.base import Microbatch, Objective
from fastp3o.packing.packed_row import PackedRow, to_device
from fastp3o.rollouts.groups import Group
from fastp3o.training.microbatches import RowLogprobs, policy_logprobs


def old_logprobs(
    source: Literal["policy", "sampler"],
    objective: Objective,
    policy: PackedModel,
    groups: Sequence[Group],
    *,
    steps: int,
    has_dropout: bool,
) -> RowLogprobs | None:
    """A function for the old log-probs of an update's rows before its steps; None: its only step's
    loss computes them.

    source: whose they are (`--old_logprobs`). steps: of the update. has_dropout: whether training
    passes drop inputs of adapters.
    """
    if source == "sampler":
        return partial(sampler_logprobs, groups)
    # A pass for them alone would be a fifth of an update of one step, whose loss computes them
    # anyway. It is made where the loss must have them before, and where dropout makes the loss's
    # log-probs others than the policy's.
    is_known_by_loss = steps == 1 and not objective.reads_old_first and not has_dropout
    return None if is_known_by_loss else partial(policy_logprobs, policy)


def sampler_logprobs(groups: Sequence[Group], rows: Sequence[PackedRow]) -> tuple[Tensor, ...]:
    """The sampler's log-probs of the rows' tokens, [N] fp32 each, on their device. Raises
    ValueError without any.
    """
    for group in groups:
        if any(response.logprobs is None for response in group.responses):
            raise UserError(
                "what sampled the responses gave no log-probs of them, as transformers' generate does not"
            )

    def of_row(row: PackedRow) -> Tensor:
        responses = (response for number in row.groups for response in groups[number].responses)
        return torch.from_numpy(
            np.concatenate([np.asarray(one.logprobs, dtype=np.float32) for one in responses])
        )

    return to_device(tuple(map(of_row, rows)), rows[0].labels.device)


def with_sampler_logprobs(
    groups: Sequence[Group], minibatches: list[list[Microbatch]]
) -> list[list[Microbatch]]:
    """The microbatches with the log-probs of what sampled."""
    sampled = iter(
        sampler_logprobs(
            groups, [microbatch.row for minibatch in minibatches for microbatch in minibatch]
        )
    )
    return [
        [replace(microbatch, sampler_token_logprobs=next(sampled)) for microbatch in minibatch]
        for minibatch in minibatches
    ]
