"""Rollouts -> packed minibatches with old and reference log-probs -> an optimizer step.

P prompts with K responses each and N scored tokens of a packed row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from fastp3o.models.packed_model import scored_logprobs
from fastp3o.models.reference import Reference
from fastp3o.models.sharding import map_rows_in_lockstep, pad_to_longest_rank
from fastp3o.objectives.base import LossAndMetrics, Microbatch, Objective, counted_tokens
from fastp3o.packing.pack import Packing, balanced, group_sizes, pack
from fastp3o.packing.packed_row import PackedRow
from fastp3o.rollouts.rollouts import Rollouts
from fastp3o.training.optimizer import Optimizer
from fastp3o.training.order import deal
from fastp3o_kernels import sequence_logprobs


def gather_rollouts(
    accelerator: Accelerator, rollouts: Rollouts, scores: dict[str, Tensor]
) -> tuple[Rollouts, dict[str, Tensor]]:
    """Rollouts and what they are worth, [P, K] each, of all processes, in the order in which `process_share` took their
    prompts.
    """
    if accelerator.num_processes == 1:
        return rollouts, scores
    shares = gather_object([(rollouts, {name: values.cpu() for name, values in scores.items()})])

    def in_order(of_shares: Sequence[list]) -> list:
        return list(chain.from_iterable(zip(*of_shares, strict=True)))

    def of_all(values: list[Any]) -> Any:
        """Of the same field of each share."""
        first = values[0]
        if isinstance(first, dict):
            return {name: of_all([value[name] for value in values]) for name in first}
        return None if first is None else in_order(values)

    fields = {name: of_all([vars(share)[name] for share, _ in shares]) for name in vars(rollouts)}
    scores = {
        name: torch.stack([share[name] for _, share in shares], 1).flatten(0, 1).to(values.device)
        for name, values in scores.items()
    }
    return Rollouts(**fields), scores


def pack_minibatches(
    accelerator: Accelerator, rollouts: Rollouts, minibatches: int, packing: Packing
) -> list[list[PackedRow]]:
    """This process's packed rows of each minibatch. Minibatches have equally many prompts, and minibatches and
    processes about as many tokens; where prompts are fewer than processes, some have no row.

    They stay as they are for all inner epochs.
    """
    prompts, responses = rollouts.prompt_ids, rollouts.response_ids
    sizes = group_sizes(prompts, responses, packing)
    members = balanced(sizes, minibatches)
    shares = deal([[sizes[p] for p in minibatch] for minibatch in members], accelerator.num_processes)
    own = [
        [minibatch[m] for m in share[accelerator.process_index]]
        for minibatch, share in zip(members, shares, strict=True)
    ]
    return [pack([prompts[p] for p in part], [responses[p] for p in part], packing, groups=part) for part in own]


@torch.no_grad()
def with_logprobs(
    accelerator: Accelerator,
    policy: nn.Module,
    reference: Reference,
    minibatches: list[list[PackedRow]],
    rewards: Tensor,
    counted: Tensor | None,
    objective: Objective,
) -> list[list[Microbatch]]:
    """Minibatches as the loss takes them; `rewards` [P, K] of all prompts, in the order they were sampled, and which of
    the responses count, [P, K] bool, None for all. objective: says what rows are weighed by.

    The old log-probs come from the policy on the very rows that it is trained on: before the first step every ratio is
    exactly 1, which neither the sampler's log-probs nor another packing would give.
    """
    minibatches = [[row.to(accelerator.device) for row in rows] for rows in minibatches]
    rows = [row for minibatch in minibatches for row in minibatch]
    every = torch.ones(rewards.shape, dtype=torch.bool) if counted is None else counted
    tokens = partial(tokens_of, counted=counted)

    def count_of(row: PackedRow) -> int:
        return int(objective.metric_count(every[list(row.groups)]))

    sizes = (tokens, tokens, count_of) if objective.averages_tokens else (prompts_of, count_of, count_of)
    shares = [list(chain.from_iterable(shares_of_minibatches(accelerator, minibatches, size))) for size in sizes]
    old_token_logprobs = map_rows_in_lockstep(rows, partial(scored_logprobs, policy))
    microbatches = iter(
        Microbatch(
            row=row,
            rewards=rewards[list(row.groups)],
            old_token_logprobs=old,
            ref_token_logprobs=ref,
            old_logprobs=sequence_logprobs(old, row.cu_seqlens).view(len(row.groups), -1),
            ref_logprobs=sequence_logprobs(ref, row.cu_seqlens).view(len(row.groups), -1),
            weight=weight,
            metrics_weight=metrics_weight,
            response_share=response_share,
            counted=None if counted is None else counted[list(row.groups)].to(rewards.device),
        )
        for row, old, ref, weight, metrics_weight, response_share in zip(
            rows, old_token_logprobs, reference(rows), *shares, strict=True
        )
    )
    return [[next(microbatches) for _ in minibatch] for minibatch in minibatches]


def shares_of_minibatches(
    accelerator: Accelerator, minibatches: list[list[PackedRow]], size: Callable[[PackedRow], int]
) -> list[list[float]]:
    """Each row's share of its minibatch's size.

    Gradients are averaged over processes, so shares are relative to the mean over processes.
    """
    sizes = [[size(row) for row in rows] for rows in minibatches]
    totals = torch.tensor(list(map(sum, sizes)), device=accelerator.device, dtype=torch.float32)
    totals = accelerator.reduce(totals, reduction="mean").tolist()
    # Where nothing counts, loss and metrics are 0 in any case.
    return [[size / (total or 1.0) for size in row_sizes] for row_sizes, total in zip(sizes, totals, strict=True)]


def prompts_of(row: PackedRow) -> int:
    return len(row.groups)


def tokens_of(row: PackedRow, counted: Tensor | None) -> int:
    """Response tokens that count; counted: [P, K] bool of all prompts."""
    return counted_tokens(row, None if counted is None else counted[list(row.groups)])


def finished(rollouts: Rollouts) -> Tensor:
    """[P, K] bool: which responses have an end-of-sequence."""
    return torch.tensor(rollouts.finished)


def optimizer_step(
    optimizer: Optimizer,
    minibatches: list[list[Microbatch]],
    index: int,
    loss: Callable[[nn.Module, Microbatch], LossAndMetrics],
    beside: Callable[[], dict[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Backward passes over one of the minibatches and one step. Returns its metrics as 0-d tensors: means, or the
    largest where a name ends in `_max`.

    beside: makes the backward passes of what else goes into the step; it returns metrics of its own.

    Raises NotFiniteError before the step when the loss or the gradient is not finite.
    """
    metrics: dict[str, Tensor] = {}
    for microbatch, counts in pad_to_longest_rank(minibatches[index], spare=first_microbatch(minibatches)):
        weight, metrics_weight = (microbatch.weight, microbatch.metrics_weight) if counts else (0.0, 0.0)
        with optimizer.accelerator.autocast():
            value, row_metrics = loss(optimizer.model, microbatch)
            optimizer.backward(value * weight)
        metrics["loss"] = metrics.get("loss", 0.0) + weight * value.detach()
        for name, metric in row_metrics.items():
            if name.endswith("_max"):
                metric = metric if counts else torch.full_like(metric, -torch.inf)
                metrics[name] = torch.maximum(metrics[name], metric) if name in metrics else metric
            else:
                metrics[name] = metrics.get(name, 0.0) + metrics_weight * metric
    if beside is not None:
        metrics |= beside()
    return metrics | optimizer.step(metrics["loss"])


def first_microbatch(minibatches: list[list[Microbatch]]) -> Microbatch:
    """Of this process, which has one in every update, but not in every minibatch."""
    return next(chain.from_iterable(minibatches))
