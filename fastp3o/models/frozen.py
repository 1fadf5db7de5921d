"""Models that do not train: a policy to sample from, a reference, a reward model."""

from collections.abc import Callable
from typing import Any

import torch

from fastp3o.config import PolicyConfig
from fastp3o.errors import UserError
from fastp3o.models.loading import load_policy
from fastp3o.models.overflow import Overflow, OverflowsError
from fastp3o.models.packable import trial_overflow
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import loading_device
from fastp3o.runtime.context import Context
from fastp3o.runtime.precision import wider_precision
from fastp3o.runtime.processes import on_main_process
from fastp3o.sources import ModelSource


def load_held(
    context: Context,
    load: Callable[..., PackedModel],
    name: ModelSource,
    *,
    dtype: torch.dtype,
    **options: Any,
) -> PackedModel:
    """A model that does not train, before it is spread over the processes: with weights in this
    dtype, or wider ones where that is fp16, which nobody has named and which does not hold it in a
    trial of a few tokens. All processes get the same dtype. load: `load_policy` or
    `load_reward_model`, with options. Raises UserError if fp16 was named.
    """
    if dtype != torch.float16:
        return load(name, dtype=dtype, **options)
    # Only fp16 has a range that a model may leave: it is tried on a few tokens.
    loaded: list[PackedModel] = []

    def tried() -> Overflow | None:
        try:
            loaded.append(load(name, dtype=dtype, **options))
            return trial_overflow(loaded[0], context.device)
        except OverflowsError as error:
            return error.overflow

    overflow = on_main_process(context.accelerator, tried)
    if overflow is None or not (overflow.happened or context.precision.automatic):
        return loaded[0] if loaded else load(name, dtype=dtype, **options)
    if not context.precision.automatic:
        raise UserError(f"{name} overflows fp16: {overflow}: --precision auto loads it in another")
    loaded.clear()  # two of them may not fit
    wider = wider_precision(trains=False)
    context.accelerator.print(
        f"--precision auto: {name} in {wider.name}, since in a trial {overflow}"
    )
    return load(name, dtype=wider.weights, **options)


def load_frozen_policy(context: Context, config: PolicyConfig, name: ModelSource) -> PackedModel:
    """A policy that does not train, before it is spread over the processes."""
    frozen = load_held(
        context,
        load_policy,
        name,
        device=loading_device(context.device, context.mesh),
        dtype=context.precision.weights,
        trust_remote_code=config.trust_remote_code,
    )
    frozen.temperature = config.temperature
    frozen.check_reach(config.longest_sequence)
    return frozen
