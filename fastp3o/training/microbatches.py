"""Rollouts -> packed minibatches with old and reference log-probs -> an optimizer step.

P prompts, K responses each, N labeled tokens in a packed row.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fastp3o.errors import UserError
from fastp3o.models.packed_model import labeled_logprobs
from fastp3o.models.reference import Reference
from fastp3o.models.sharding import map_rows_in_lockstep, most_passes, padded
from fastp3o.models.trainable import dropout_on
from fastp3o.objectives.base import LossAndMetrics, Microbatch, Objective
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.packing.bins import balanced, deal
from fastp3o.packing.pack import Packing, group_sizes
from fastp3o.packing.packed_row import PackedRow, to_device
from fastp3o.rollouts.groups import Group, pack_groups, token_ids
from fastp3o.runtime.finiteness import require_finite
from fastp3o.runtime.shares import Share

# Log-probs of rows' tokens, [N] fp32 for each row.
RowLogprobs = Callable[[Sequence[PackedRow]], Sequence[Tensor]]


# --- rows of an update ----------------------------------------------------------------------------


def pack_minibatches(
    share: Share, groups: list[Group], minibatches: int, packing: Packing
) -> list[list[PackedRow]]:
    """Packs this process's share of each minibatch, for all inner epochs. Minibatches have equally
    many prompts. Tokens are balanced between minibatches, and between shares. With fewer prompts
    than shares, some have no row.
    """
    prompts, responses = token_ids(groups)
    sizes = group_sizes(prompts, responses, packing)
    # First the prompts go to the minibatches, then those of each minibatch to the shares.
    prompts_of = balanced(sizes, minibatches)
    sizes_of = [[sizes[prompt] for prompt in minibatch] for minibatch in prompts_of]
    rows = []
    for minibatch, by_share in zip(prompts_of, deal(sizes_of, share.count), strict=True):
        part = [minibatch[place] for place in by_share[share.index]]
        rows.append(pack_groups(groups, packing, part))
    return rows


@torch.no_grad()
def make_microbatches(
    accelerator: Accelerator,
    old: RowLogprobs | None,
    reference: Reference,
    minibatches: list[list[PackedRow]],
    rewards: Tensor,
    loss_mask: Tensor | None,
    *,
    noted: bool = False,
) -> list[list[Microbatch]]:
    """Adds the loss's inputs to the rows: rewards, old and reference log-probs.

    old: gives the old log-probs. If they come from the policy on the very rows that it is trained
    on, every ratio is exactly 1 before the first step, which neither the sampler's log-probs nor
    another packing would give. None: the update's only loss computes them. noted: whether the first
    loss leaves the policy's log-probs, as it then does.

    rewards: [P, K] of all prompts, in the order they were sampled. loss_mask: [P, K] bool, what
    takes part, or None.
    """
    on_host = tuple(chain.from_iterable(minibatches))
    tables = tuple((rewards[list(row.groups)], masked(loss_mask, row)) for row in on_host)
    # One copy for all rows.
    rows, row_tables = to_device((on_host, tables), accelerator.device)
    room = [unknown_logprobs(row) for row in rows] if noted or old is None else []
    old_logprobs = room if old is None else old(rows)
    if old is not None and accelerator.device.type == "cpu":
        # Where the losses would take it for a caller's mistake.
        require_finite(accelerator, "an old log-probability", torch.cat([*old_logprobs]))
    noted_logprobs: Sequence[Tensor | None] = room or [None] * len(rows)
    microbatches = (
        Microbatch(
            row=row,
            rewards=table,
            old_token_logprobs=old_tokens,
            ref_token_logprobs=ref_tokens,
            noted_token_logprobs=noted_tokens,
            loss_mask=mask,
        )
        for row, (table, mask), old_tokens, ref_tokens, noted_tokens in zip(
            rows, row_tables, old_logprobs, reference(rows), noted_logprobs, strict=True
        )
    )
    return [[next(microbatches) for _ in minibatch] for minibatch in minibatches]


def with_token_rewards(
    minibatches: list[list[Microbatch]], rewards: Tensor
) -> list[list[Microbatch]]:
    """Adds the rewards of tokens. rewards: [P, K, L] of all prompts, of each response's first
    tokens, on the CPU.
    """

    def added(microbatch: Microbatch) -> Microbatch:
        table = to_device(rewards[list(microbatch.row.groups)], microbatch.rewards.device).flatten(
            0, 1
        )
        places = torch.arange(table.shape[1], device=table.device)
        return replace(
            microbatch, token_rewards=table[places < microbatch.row.cu_seqlens.diff()[:, None]]
        )

    return [[added(one) for one in minibatch] for minibatch in minibatches]


def masked(loss_mask: Tensor | None, row: PackedRow) -> Tensor | None:
    """The loss mask of a row's groups, [P, K] bool."""
    return None if loss_mask is None else loss_mask[list(row.groups)]


# --- log-probs before a step ----------------------------------------------------------------------


def policy_logprobs(policy: nn.Module, rows: Sequence[PackedRow]) -> list[Tensor]:
    """The policy's log-probs of the rows' tokens, [N] fp32 for each row."""
    return map_rows_in_lockstep(rows, partial(labeled_logprobs, policy))


def unknown_logprobs(row: PackedRow) -> Tensor:
    """Room for log-probs of a row's tokens, [N] fp32; NaN, so that nothing takes them for known
    ones.
    """
    return torch.full((len(row.labels),), torch.nan, device=row.labels.device)


Item = TypeVar("Item")  # what a backward pass is made over: a row with the inputs of its loss


# --- passes of a step -----------------------------------------------------------------------------


class Passes(NamedTuple, Generic[Item]):
    """The backward passes of a minibatch on this process. rows: and whether each counts: processes
    make equally many passes. divisor: of the losses; a mean over the processes, since their
    gradients are averaged.
    """

    rows: list[tuple[Item, bool]]
    divisor: float | Tensor


def counted(passes: Passes[Item]) -> list[Item]:
    """The rows of a minibatch that count, or the one that stands in for none."""
    return [row for row, counts in passes.rows if counts] or [passes.rows[0][0]]


def equal_passes(
    accelerator: Accelerator,
    minibatches: list[list[Microbatch]],
    loss_mask: Tensor | None,
    objective: Objective,
) -> list[Passes[Microbatch]]:
    """The minibatches with as many rows as the process with most has in each: further ones do not
    count. loss_mask: [P, K] bool of all prompts, on the CPU.
    """
    sizes = [
        sum(
            objective.divisor(microbatch.row, masked(loss_mask, microbatch.row))
            for microbatch in minibatch
        )
        for minibatch in minibatches
    ]
    divisors = torch.tensor(sizes, dtype=torch.float32)
    if accelerator.num_processes > 1:
        divisors = accelerator.reduce(
            to_device(divisors, accelerator.device), reduction="mean"
        ).cpu()
    # This process has a microbatch in every update, but not in every minibatch.
    spare = next(chain.from_iterable(minibatches))
    return [
        # If nothing takes part, the loss is 0 in any case.
        Passes(padded(minibatch, spare, passes), divisor or 1.0)
        for minibatch, passes, divisor in zip(
            minibatches, most_passes(minibatches), divisors.tolist(), strict=True
        )
    ]


def add_gradients(
    optimizer: Optimizer,
    passes: Passes[Item],
    loss: Callable[[nn.Module, Item, float | Tensor], LossAndMetrics],
    further_passes: Callable[[], dict[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Makes the backward passes over a minibatch. Returns the loss, 0-d, and the sums of its
    metrics on this process, as `mean_over_steps` takes them. Does not wait for the device:
    `Optimizer.require_finite` tells of failures.

    loss: of a row, divided by the divisor that is its last argument. further_passes: makes further
    backward passes for the step, and returns its metrics.
    """
    scale = optimizer.loss_scale
    # The scale of fp16's loss is a part of the divisor, so that a row's incoming gradient is 1 in
    # any precision.
    divisor = passes.divisor if scale is None else passes.divisor / scale
    total = torch.zeros((), device=optimizer.accelerator.device)
    metrics = MetricSums()
    for row, counts in passes.rows:
        with optimizer.accelerator.autocast(), dropout_on(optimizer.model):
            value, row_metrics = loss(optimizer.model, row, divisor)
            if not value.requires_grad:
                raise UserError(
                    "the objective's loss has no gradient: it is detached, or a constant of the log-probs, and nothing "
                    "would be learned"
                )
            value = value if counts else value * 0.0
            value.backward()
        total = total + value.detach()
        metrics.add(row_metrics, counts=counts)
    further = {} if further_passes is None else further_passes()
    return {"loss": total if scale is None else total / scale, **metrics.read(), **further}


# --- metrics of a step ----------------------------------------------------------------------------


class MetricSums:
    """Metrics of several rows (`LossAndMetrics`), added up in a few launches a row."""

    def __init__(self) -> None:
        self.summed: tuple[str, ...] = ()
        self.maxima: tuple[str, ...] = ()
        self.sums: Tensor | float = 0.0
        self.largest: Tensor | None = None

    def add(self, metrics: dict[str, Tensor], *, counts: bool = True) -> None:
        """Adds a row's metrics, the same names for every row. counts: whether the row does."""
        self.maxima = tuple(name for name in metrics if name.endswith("_max"))
        self.summed = tuple(name for name in metrics if name not in self.maxima)
        if self.summed:
            self.sums = self.sums + float(counts) * torch.stack(
                [metrics[name] for name in self.summed]
            )
        if self.maxima:
            values = torch.stack([metrics[name] for name in self.maxima])
            values = values if counts else torch.full_like(values, -torch.inf)
            self.largest = values if self.largest is None else torch.maximum(self.largest, values)

    def read(self) -> dict[str, Tensor]:
        """The metrics by name: maxima 0-d, the others [2], sums with counts."""
        sums = (
            dict(zip(self.summed, self.sums, strict=True)) if isinstance(self.sums, Tensor) else {}
        )
        return sums | (
            dict(zip(self.maxima, self.largest, strict=True)) if self.largest is not None else {}
        )


def mean_over_steps(
    accelerator: Accelerator, steps: Sequence[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Metrics of optimizer steps over all processes, 0-d: maxima, and means over the steps. A
    step's own metrics are sums with counts, [2], which are divided here, 0 where nothing counts;
    maxima, whose names end in `_max`; and numbers that are means over the processes, 0-d.
    """
    maxima = sorted(name for name in steps[0] if name.endswith("_max"))
    fractions = sorted(name for name, value in steps[0].items() if value.dim())
    numbers = sorted(steps[0].keys() - {*maxima, *fractions})

    def table(names: Sequence[str]) -> Tensor:
        """[steps, names], or [steps, names, 2] of fractions."""
        return torch.stack([torch.stack([step[name] for name in names]) for step in steps])

    # Numbers and fractions are averaged over the processes in one exchange.
    averaged = torch.cat([table(names).flatten() for names in (numbers, fractions) if names])
    if accelerator.num_processes > 1:
        averaged = accelerator.reduce(averaged, reduction="mean")
    of_numbers = averaged[: len(steps) * len(numbers)]
    of_fractions = averaged[len(steps) * len(numbers) :]

    means: dict[str, Tensor] = {}
    if numbers:
        means |= zip(numbers, of_numbers.view(len(steps), -1).mean(0), strict=True)
    if fractions:
        sums, counts = of_fractions.view(len(steps), len(fractions), 2).unbind(-1)
        # Counts are means over the processes, and may be below 1.
        ratios = torch.where(counts > 0, sums / counts, 0.0)
        means |= zip(fractions, ratios.mean(0), strict=True)
    if maxima:
        largest = table(maxima).amax(0)
        if accelerator.num_processes > 1:
            largest = accelerator.gather(largest[None]).amax(0)
        means |= zip(maxima, largest, strict=True)
    return means
