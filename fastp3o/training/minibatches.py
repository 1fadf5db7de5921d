"""Rollouts -> packed minibatches with old and reference log-probs -> an optimizer step.

P prompts with K responses each and N scored tokens of a packed row.
"""

from collections.abc import Callable
from itertools import chain

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fastp3o.models.packed_model import scored_logprobs
from fastp3o.models.reference import Reference
from fastp3o.objectives.base import LossAndMetrics, Microbatch
from fastp3o.packing.pack import Packing, balanced, group_sizes, pack
from fastp3o.packing.packed_row import PackedRow
from fastp3o.rollouts.rollouts import Rollouts
from fastp3o.training.optimizer import Optimizer
from fastp3o_kernels import sequence_logprobs


def pack_minibatches(rollouts: Rollouts, minibatches: int, packing: Packing) -> list[list[PackedRow]]:
    """The packed rows of each minibatch: equally many prompts, and about as many tokens.

    They stay as they are for all inner epochs.
    """
    prompts, responses = rollouts.prompt_ids, rollouts.response_ids
    return [
        pack([prompts[p] for p in members], [responses[p] for p in members], packing, groups=members)
        for members in balanced(group_sizes(prompts, responses, packing), minibatches)
    ]


@torch.no_grad()
def with_logprobs(
    accelerator: Accelerator,
    policy: nn.Module,
    reference: Reference,
    minibatches: list[list[PackedRow]],
    rewards: Tensor,
    *,
    averages_tokens: bool,
) -> list[list[Microbatch]]:
    """Minibatches as the loss takes them; `rewards` [P, K] of all prompts, in the order they were sampled.

    The old log-probs come from the policy on the very rows that it is trained on: before the first step every ratio is
    exactly 1, which neither the sampler's log-probs nor another packing would give.
    """
    minibatches = [[row.to(accelerator.device) for row in rows] for rows in minibatches]
    rows = [row for minibatch in minibatches for row in minibatch]
    prompt_shares, weights = (
        list(chain.from_iterable(loss_weights(accelerator, minibatches, of_tokens)))
        for of_tokens in (False, averages_tokens)
    )
    old_token_logprobs = [scored_logprobs(policy, row) for row in rows]
    microbatches = iter(
        Microbatch(
            row=row,
            rewards=rewards[list(row.groups)],
            old_token_logprobs=old,
            ref_token_logprobs=ref,
            old_logprobs=sequence_logprobs(old, row.cu_seqlens).view(len(row.groups), -1),
            ref_logprobs=sequence_logprobs(ref, row.cu_seqlens).view(len(row.groups), -1),
            weight=weight,
            prompt_share=prompt_share,
        )
        for row, old, ref, weight, prompt_share in zip(
            rows, old_token_logprobs, reference(rows), weights, prompt_shares, strict=True
        )
    )
    return [[next(microbatches) for _ in minibatch] for minibatch in minibatches]


def loss_weights(
    accelerator: Accelerator, minibatches: list[list[PackedRow]], averages_tokens: bool
) -> list[list[float]]:
    """Each row's share of its minibatch: of its prompts, or of its response tokens where the loss averages those.

    Gradients are averaged over processes, so shares are relative to the mean over processes.
    """
    sizes = [[len(row.labels) if averages_tokens else len(row.groups) for row in rows] for rows in minibatches]
    totals = torch.tensor(list(map(sum, sizes)), device=accelerator.device, dtype=torch.float32)
    totals = accelerator.reduce(totals, reduction="mean").tolist()
    return [[size / total for size in row_sizes] for row_sizes, total in zip(sizes, totals, strict=True)]


def optimizer_step(
    optimizer: Optimizer, minibatch: list[Microbatch], loss: Callable[[nn.Module, Microbatch], LossAndMetrics]
) -> dict[str, Tensor]:
    """Backward passes over a minibatch and one step. Returns its metrics as 0-d tensors: means, or the largest where
    a name ends in `_max`.

    Raises NotFiniteError before the step when the loss or the gradient is not finite.
    """
    metrics: dict[str, Tensor] = {}
    for number, microbatch in enumerate(minibatch, 1):
        with optimizer.accumulating(last=number == len(minibatch)):
            value, row_metrics = loss(optimizer.model, microbatch)
            optimizer.backward(value * microbatch.weight)
        for name, metric in {"loss": value.detach(), **row_metrics}.items():
            if name.endswith("_max"):
                metrics[name] = torch.maximum(metrics[name], metric) if name in metrics else metric
            else:
                metrics[name] = metrics.get(name, 0.0) + microbatch.weight * metric
    return metrics | optimizer.step(metrics["loss"])
