"""Rollouts -> packed minibatches with old and reference log-probs -> an optimizer step.

P prompts, K responses each, N labelled tokens in a packed row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from fastp3o.models.packed_model import labelled_logprobs
from fastp3o.models.reference import Reference
from fastp3o.models.sharding import longest_ranks, map_rows_in_lockstep, padded
from fastp3o.models.trainable import dropout_on
from fastp3o.objectives.base import LossAndMetrics, Microbatch, Objective, counted_tokens
from fastp3o.packing.on_device import to_device
from fastp3o.packing.pack import Packing, balanced, group_sizes, pack
from fastp3o.packing.packed_row import PackedRow
from fastp3o.rollouts.groups import Group, token_ids
from fastp3o.training.optimizer import Optimizer
from fastp3o.training.order import deal
from fastp3o_kernels import sequence_logprobs

RowLogprobs = Callable[[Sequence[PackedRow]], Sequence[Tensor]]  # log-probs of rows' tokens, [N] fp32 for each row
Rewards = dict[str, Tensor]  # tables [P, K] fp32 on the CPU by name; `reward` is what is maximised


def gather_groups(accelerator: Accelerator, groups: list[Group], rewards: Rewards) -> tuple[list[Group], Rewards]:
    """Gathers the groups and rewards of all processes, ordered by the numbers of their prompts. Columns are not sent:
    only rewards read them.
    """
    if accelerator.num_processes == 1:
        return groups, rewards
    sent = [Group(group.prompt._replace(columns={}), group.responses) for group in groups]
    shares = gather_object([(sent, rewards)])
    groups = [group for share, _ in shares for group in share]
    order = sorted(range(len(groups)), key=lambda place: groups[place].prompt.number)
    tables = {name: torch.cat([table[name] for _, table in shares])[order] for name in rewards}
    return [groups[place] for place in order], tables


def pack_minibatches(
    accelerator: Accelerator, groups: list[Group], minibatches: int, packing: Packing
) -> list[list[PackedRow]]:
    """Packs this process's share of each minibatch, for all inner epochs.

    Minibatches have equally many prompts. Tokens are balanced between minibatches, and between processes. With fewer
    prompts than processes, some processes have no row.
    """
    prompts, responses = token_ids(groups)
    sizes = group_sizes(prompts, responses, packing)
    members = balanced(sizes, minibatches)
    shares = deal([[sizes[p] for p in minibatch] for minibatch in members], accelerator.num_processes)
    own = [
        [minibatch[m] for m in share[accelerator.process_index]]
        for minibatch, share in zip(members, shares, strict=True)
    ]
    return [pack([prompts[p] for p in part], [responses[p] for p in part], packing, groups=part) for part in own]


@torch.no_grad()
def make_microbatches(
    accelerator: Accelerator,
    old: RowLogprobs,
    reference: Reference,
    minibatches: list[list[PackedRow]],
    rewards: Tensor,
    counted: Tensor | None,
    objective: Objective,
) -> list[list[Microbatch]]:
    """Adds the loss's inputs to the rows: rewards, old and reference log-probs, weights.

    old: gives the old log-probs. If they come from the policy on the very rows that it is trained on, every ratio is
    exactly 1 before the first step, which neither the sampler's log-probs nor another packing would give.

    rewards: [P, K] of all prompts, in the order they were sampled. counted: [P, K] bool, the responses that take
    part in the loss, None for all. objective: decides how rows are weighted.
    """
    every = torch.ones(rewards.shape, dtype=torch.bool) if counted is None else counted
    weights = row_weights(accelerator, minibatches, every, objective)
    on_host = list(chain.from_iterable(minibatches))
    token_counts = [counted_tokens(row, every[list(row.groups)]) for row in on_host]
    tables = ((rewards[list(row.groups)], None if counted is None else counted[list(row.groups)]) for row in on_host)
    # One copy for all rows.
    rows, own_tables = to_device((tuple(on_host), tuple(tables)), accelerator.device)
    microbatches = iter(map(make_microbatch, rows, own_tables, token_counts, old(rows), reference(rows), weights))
    return [[next(microbatches) for _ in minibatch] for minibatch in minibatches]


def policy_logprobs(policy: nn.Module, rows: Sequence[PackedRow]) -> list[Tensor]:
    """The policy's log-probs of the rows' tokens, [N] fp32 for each row."""
    return map_rows_in_lockstep(rows, partial(labelled_logprobs, policy))


class RowWeights(NamedTuple):
    """A row's shares of its minibatch. Processes are averaged, so shares are of the mean over processes."""

    loss: float
    metrics: float
    responses: float  # share of `Objective.metric_count`


def row_weights(
    accelerator: Accelerator, minibatches: list[list[PackedRow]], counted: Tensor, objective: Objective
) -> list[RowWeights]:
    """Weights of all rows of this process, one minibatch after the other. counted: [P, K] bool of all prompts."""

    def sizes(row: PackedRow) -> tuple[int, int, int]:
        own = counted[list(row.groups)]
        counts = int(objective.metric_count(own))
        if objective.averages_tokens:
            tokens = counted_tokens(row, own)
            return tokens, tokens, counts
        return len(row.groups), counts, counts

    row_sizes = [[sizes(row) for row in rows] for rows in minibatches]
    sums = [[sum(column) for column in zip((0, 0, 0), *rows, strict=True)] for rows in row_sizes]
    totals = torch.tensor(sums, dtype=torch.float32)
    if accelerator.num_processes > 1:
        totals = accelerator.reduce(to_device(totals, accelerator.device), reduction="mean")
    return [
        # If nothing counts, loss and metrics are 0 in any case.
        RowWeights(*(size / (total or 1.0) for size, total in zip(row, minibatch_totals, strict=True)))
        for rows, minibatch_totals in zip(row_sizes, totals.tolist(), strict=True)
        for row in rows
    ]


def make_microbatch(
    row: PackedRow,
    tables: tuple[Tensor, Tensor | None],
    token_count: int,
    old: Tensor,
    ref: Tensor,
    weights: RowWeights,
) -> Microbatch:
    """tables: rewards and counted responses of the row's groups, [P, K] each. old, ref: [N] fp32, log-probs of its
    tokens.
    """
    rewards, counted = tables
    return Microbatch(
        row=row,
        rewards=rewards,
        old_token_logprobs=old,
        ref_token_logprobs=ref,
        old_logprobs=sequence_logprobs(old, row.cu_seqlens).view(rewards.shape),
        ref_logprobs=sequence_logprobs(ref, row.cu_seqlens).view(rewards.shape),
        weight=weights.loss,
        metrics_weight=weights.metrics,
        response_share=weights.responses,
        counted=counted,
        token_count=token_count,
    )


Passes = list[tuple[Microbatch, bool]]  # the rows of a minibatch, and whether each counts


def equal_passes(minibatches: list[list[Microbatch]]) -> list[Passes]:
    """The minibatches with as many rows as the process with most has in each: further ones do not count."""
    spare = first_microbatch(minibatches)
    longest = longest_ranks([len(minibatch) for minibatch in minibatches])
    return [padded(minibatch, spare, length) for minibatch, length in zip(minibatches, longest, strict=True)]


def optimizer_step(
    optimizer: Optimizer,
    passes: Passes,
    loss: Callable[[nn.Module, Microbatch], LossAndMetrics],
    further_passes: Callable[[], dict[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Makes the backward passes over a minibatch, and one step. Returns its metrics as 0-d tensors: maxima if their
    names end in `_max`, else means.

    further_passes: makes further backward passes for the step, and returns metrics of its own.

    Does not wait for the device: whether loss and gradient were finite says `Optimizer.require_finite`.
    """
    total = torch.zeros((), device=optimizer.accelerator.device)
    metrics = MetricSums()
    for microbatch, counts in passes:
        with optimizer.accelerator.autocast(), dropout_on(optimizer.model):
            value, row_metrics = loss(optimizer.model, microbatch)
            weighted = value * (microbatch.weight if counts else 0.0)
            optimizer.backward(weighted)
        total = total + weighted.detach()
        metrics.add(row_metrics, microbatch.metrics_weight, counts=counts)
    further = {} if further_passes is None else further_passes()
    return {"loss": total, **metrics.read(), **further} | optimizer.step(total)


class MetricSums:
    """Metrics of a minibatch, added up in a few launches a row."""

    def __init__(self) -> None:
        self.means: tuple[str, ...] = ()
        self.maxima: tuple[str, ...] = ()
        self.sums: Tensor | float = 0.0
        self.largest: Tensor | None = None

    def add(self, metrics: dict[str, Tensor], weight: float, *, counts: bool) -> None:
        """Adds a row's metrics, the same names for every row. weight: the row's share of the means."""
        self.maxima = tuple(name for name in metrics if name.endswith("_max"))
        self.means = tuple(name for name in metrics if name not in self.maxima)
        if self.means:
            values = torch.stack([metrics[name] for name in self.means])
            self.sums = self.sums + (weight if counts else 0.0) * values
        if self.maxima:
            values = torch.stack([metrics[name] for name in self.maxima])
            values = values if counts else torch.full_like(values, -torch.inf)
            self.largest = values if self.largest is None else torch.maximum(self.largest, values)

    def read(self) -> dict[str, Tensor]:
        """The metrics by name, 0-d."""
        sums = dict(zip(self.means, self.sums, strict=True)) if isinstance(self.sums, Tensor) else {}
        return sums | (dict(zip(self.maxima, self.largest, strict=True)) if self.largest is not None else {})


def first_microbatch(minibatches: list[list[Microbatch]]) -> Microbatch:
    """This process's first microbatch. It has one in every update, but not in every minibatch."""
    return next(chain.from_iterable(minibatches))
