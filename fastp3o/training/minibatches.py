"""One update of the policy: rollouts -> minibatches with old and reference log-probs -> optimizer steps.

P prompts with K responses each and N response tokens of a packed row; sequence K p + k is response k of prompt p. In
the paper K is 2, and the responses to a prompt are a pair.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fastp3o.config import OnlineConfig
from fastp3o.models.packed_model import scored_logprobs
from fastp3o.models.reference import Reference
from fastp3o.packing.pack import PackedRow, balanced, group_tokens, in_groups, pack
from fastp3o.rollouts.transformers_sampler import Rollouts
from fastp3o.training.optimizer import Optimization
from fastp3o_kernels import sequence_logprobs


@dataclass
class Pairs:
    """A packed row as the loss takes it."""

    row: PackedRow
    rewards: Tensor  # [P, K] fp32, scaled
    old_token_logprobs: Tensor  # [N] fp32, of the policy that sampled
    ref_token_logprobs: Tensor  # [N] fp32, of the reference
    old_logprobs: Tensor  # [P, K] fp32, sums over a response's tokens
    ref_logprobs: Tensor  # [P, K] fp32
    weight: float  # of its loss, so that a minibatch's losses add up to the mean over all processes


# A packed row's loss, 0-d, and metrics of it, 0-d and detached.
LossOf = Callable[[nn.Module, Pairs], tuple[Tensor, dict[str, Tensor]]]


def pack_minibatches(rollouts: Rollouts, minibatches: int, config: OnlineConfig) -> list[list[PackedRow]]:
    """The packed rows of each minibatch: equally many prompts, and about as many tokens.

    They stay as they are for all inner epochs.
    """
    K = config.responses_per_prompt
    prompts, responses = in_groups(rollouts.prompt_ids, rollouts.response_ids, K)
    sizes = [
        group_tokens(len(prompt), list(map(len, group)), share_prompts=config.share_prompts)
        for prompt, group in zip(prompts, responses, strict=True)
    ]
    return [
        pack(
            [prompts[p] for p in members],
            [responses[p] for p in members],
            tokens_per_row=config.tokens_per_row,
            share_prompts=config.share_prompts,
            sequences=[s for p in members for s in range(K * p, K * p + K)],
        )
        for members in balanced(sizes, minibatches)
    ]


@torch.no_grad()
def with_logprobs(
    accelerator: Accelerator,
    policy: nn.Module,
    reference: Reference,
    minibatches: list[list[PackedRow]],
    rewards: Tensor,
    *,
    by_tokens: bool,
) -> list[list[Pairs]]:
    """Minibatches as the loss takes them; `rewards` [P, K] of all prompts, in the order they were sampled.

    The old log-probs come from the policy on the very rows that it is trained on: before the first step every ratio is
    exactly 1, which neither the sampler's log-probs nor another packing would give.
    """
    K = rewards.shape[1]
    minibatches = [[row.to(accelerator.device) for row in rows] for rows in minibatches]
    every_row = [row for rows in minibatches for row in rows]
    with accelerator.autocast():
        old_token_logprobs = [scored_logprobs(policy, row) for row in every_row]
        ref_token_logprobs = reference(every_row)
    weights = [weight for of_rows in loss_weights(accelerator, minibatches, by_tokens=by_tokens) for weight in of_rows]
    pairs = iter(
        Pairs(
            row=row,
            rewards=rewards[[s // K for s in row.sequences[::K]]].to(accelerator.device),
            old_token_logprobs=old,
            ref_token_logprobs=ref,
            old_logprobs=sequence_logprobs(old, row.cu_seqlens).view(-1, K),
            ref_logprobs=sequence_logprobs(ref, row.cu_seqlens).view(-1, K),
            weight=weight,
        )
        for row, old, ref, weight in zip(every_row, old_token_logprobs, ref_token_logprobs, weights, strict=True)
    )
    return [[next(pairs) for _ in rows] for rows in minibatches]


def loss_weights(accelerator: Accelerator, minibatches: list[list[PackedRow]], *, by_tokens: bool) -> list[list[float]]:
    """Each row's share of its minibatch: of its prompts, or of its response tokens where the loss averages those.

    Gradients are averaged over processes, so shares are relative to the mean over processes.
    """
    sizes = [[len(row.labels) if by_tokens else len(row.sequences) for row in rows] for rows in minibatches]
    totals = torch.tensor([sum(of_rows) for of_rows in sizes], device=accelerator.device, dtype=torch.float32)
    totals = accelerator.reduce(totals, reduction="mean").tolist()
    return [[size / total for size in of_rows] for of_rows, total in zip(sizes, totals, strict=True)]


def optimizer_step(optimization: Optimization, minibatch: list[Pairs], loss_of: LossOf) -> dict[str, Tensor]:
    """Backward passes over a minibatch and one step. Returns its metrics as 0-d tensors: means, or the largest where
    a name ends in `_max`.

    Raises NotFiniteError before the step when the loss or the gradient is not finite.
    """
    metrics: dict[str, Tensor] = {}
    for number, pairs in enumerate(minibatch, 1):
        with optimization.row(last=number == len(minibatch)):
            loss, of_pairs = loss_of(optimization.model, pairs)
            optimization.backward(loss * pairs.weight)
        for name, value in {"loss": loss.detach(), **of_pairs}.items():
            if name.endswith("_max"):
                metrics[name] = torch.maximum(metrics[name], value) if name in metrics else value
            else:
                metrics[name] = metrics.get(name, 0.0) + pairs.weight * value
    return metrics | optimization.step(metrics["loss"])
