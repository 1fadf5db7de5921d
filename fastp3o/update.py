"""One update of the policy: rollouts -> minibatches with old and reference log-probs -> clipped steps.

P pairs, N response tokens of a microbatch; sequence 2p is response 1 of pair p, sequence 2p + 1 its response 2.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from fastp3o.config import P3OConfig
from fastp3o.finite import require_finite
from fastp3o.models import scored_logits, scored_logprobs
from fastp3o.padding import Batch, pad
from fastp3o.rollouts import Rollouts
from fastp3o_kernels import logits_p3o_loss, sequence_logprobs


@dataclass
class Pairs:
    """A microbatch as the loss takes it."""

    batch: Batch
    rewards: Tensor  # [P, 2] fp32, scaled
    old_token_logprobs: Tensor  # [N] fp32, of the policy that sampled
    old_logprobs: Tensor  # [P, 2] fp32, their sums
    ref_logprobs: Tensor  # [P, 2] fp32, of the reference
    weight: float  # of its loss, so that a minibatch's losses add up to the mean over all processes


def make_minibatches(
    accelerator: Accelerator,
    policy: nn.Module,
    reference: nn.Module,
    rollouts: Rollouts,
    rewards: Tensor,
    *,
    pad_token_id: int,
    config: P3OConfig,
) -> list[list[Pairs]]:
    """This process's part of every minibatch, cut into microbatches.

    They stay as they are for all inner epochs, and the old log-probs come from the policy on these very batches: before
    the first step every ratio is exactly 1, which neither the sampler's log-probs nor other batches would give.
    """
    per_minibatch = config.pairs_per_minibatch // accelerator.num_processes
    parts = [
        [
            slice(start, min(start + config.pairs_per_microbatch, first + per_minibatch))
            for start in range(first, first + per_minibatch, config.pairs_per_microbatch)
        ]
        for first in range(0, len(rewards), per_minibatch)
    ]
    weights = loss_weights(accelerator, rollouts, parts, by_tokens=config.clipping == "token")

    def pairs_of(part: slice, weight: float) -> Pairs:
        sequences = rollouts[2 * part.start : 2 * part.stop]
        batch = pad(sequences.prompt_ids, sequences.response_ids, pad_token_id=pad_token_id).to(accelerator.device)
        with torch.no_grad(), accelerator.autocast():
            old_token_logprobs = scored_logprobs(policy, batch)
            ref_token_logprobs = scored_logprobs(reference, batch)
        return Pairs(
            batch=batch,
            rewards=rewards[part].to(accelerator.device),
            old_token_logprobs=old_token_logprobs,
            old_logprobs=sequence_logprobs(old_token_logprobs, batch.cu_seqlens).view(-1, 2),
            ref_logprobs=sequence_logprobs(ref_token_logprobs, batch.cu_seqlens).view(-1, 2),
            weight=weight,
        )

    return [
        [pairs_of(part, weight) for part, weight in zip(of_minibatch, of_weights, strict=True)]
        for of_minibatch, of_weights in zip(parts, weights, strict=True)
    ]


def loss_weights(
    accelerator: Accelerator, rollouts: Rollouts, parts: list[list[slice]], *, by_tokens: bool
) -> list[list[float]]:
    """Each microbatch's share of its minibatch: of its pairs, or of its response tokens where the loss averages those.

    Gradients are averaged over processes, so shares are relative to the mean over processes.
    """
    sizes = [
        [
            sum(map(len, rollouts.response_ids[2 * part.start : 2 * part.stop]))
            if by_tokens
            else part.stop - part.start
            for part in of_minibatch
        ]
        for of_minibatch in parts
    ]
    totals = torch.tensor([sum(of_minibatch) for of_minibatch in sizes], device=accelerator.device, dtype=torch.float32)
    totals = accelerator.reduce(totals, reduction="mean").tolist()
    return [[size / total for size in of_minibatch] for of_minibatch, total in zip(sizes, totals, strict=True)]


def optimizer_step(
    accelerator: Accelerator, policy: nn.Module, optimizer: Optimizer, minibatch: list[Pairs], config: P3OConfig
) -> dict[str, Tensor]:
    """Backward passes over a minibatch and one step. Returns its metrics as 0-d tensors, `ratio_max` the largest.

    Raises NotFiniteError before the step when the loss or the gradient is not finite.
    """
    metrics: dict[str, Tensor] = {}
    for number, pairs in enumerate(minibatch):
        more_to_come = number + 1 < len(minibatch)
        with accelerator.no_sync(policy) if more_to_come else nullcontext():
            loss, of_pairs = logits_p3o_loss(
                scored_logits(policy, pairs.batch),
                pairs.batch.labels,
                pairs.batch.cu_seqlens,
                pairs.old_logprobs,
                pairs.ref_logprobs,
                pairs.rewards,
                clipping=config.clipping,
                clip_range=config.clip_range,
                ratio_cap=config.ratio_cap,
                kl_coef=config.kl_coef,
                kl_reward=config.kl_reward,
                old_token_logprobs=pairs.old_token_logprobs if config.clipping == "token" else None,
                inplace_backward=True,
            )
            accelerator.backward(loss * pairs.weight)
        for name, value in {"loss": loss.detach(), **of_pairs}.items():
            if name == "ratio_max":
                metrics[name] = torch.maximum(metrics[name], value) if name in metrics else value
            else:
                metrics[name] = metrics.get(name, 0.0) + pairs.weight * value
    metrics["grad_norm"] = accelerator.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
    require_finite(accelerator, "the loss or the gradient", torch.stack([metrics["loss"], metrics["grad_norm"]]))
    optimizer.step()
    optimizer.zero_grad()
    return metrics
