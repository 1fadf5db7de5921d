"""P3O on a padded batch of responses, from a model whose head is exposed, whatever trainer made the batch.

B = P K rows, K responses to each of P prompts; T positions, N response tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastp3o_kernels import (
    Groups,
    Head,
    LinearLossOutput,
    P3OSettings,
    ResponseTokens,
    linear_logprobs,
    linear_loss,
    p3o_loss,
    response_tokens,
)

METRICS = ("ratio_mean", "clip_fraction", "advantage_mean_abs", "zero_gradient_fraction", "kl")


class PaddedBatch(NamedTuple):
    """Responses as trainers hold them.

    input_ids, attention_mask: [B, T]. response_mask: [B, T], 1 at the responses' own tokens. responses_per_prompt: K.
    order: [B], which row comes first, second, ..., so that siblings are neighbours; None where they are.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    responses_per_prompt: int
    order: Tensor | None = None

    def tokens(self) -> ResponseTokens:
        K = self.responses_per_prompt
        return response_tokens(self.input_ids, self.response_mask, responses_per_prompt=K, order=self.order)


def padded_p3o_loss(
    model: Callable[..., LinearLossOutput],
    batch: PaddedBatch,
    of_responses: Mapping[str, Tensor],
    settings: P3OSettings,
    *,
    temperature: float = 1.0,
    averaged_prompts: float | Tensor | None = None,
) -> LinearLossOutput:
    """The mean over the pairs of a batch, and metrics, means too.

    A pair with an empty response (a truncated completion that is masked) has no gradient and stays in the mean, as
    masked completions stay in TRL's: every batch of equally many prompts weighs the same. `metrics["pairs"]` is the
    share of the others, which metrics are means over.

    Args:
        model: after `expose_head`, in whatever wrapper.
        of_responses: [P, K] each: "rewards", and where the batch was sampled by an earlier policy "old_logprobs", where
            the KL counts "ref_logprobs". Without old ones the policy is taken for the one that sampled.
        settings: clipping is "joint", "separate" or "none".
        temperature: of the sampler, which divides logits.
        averaged_prompts: what the mean is over, P by default. For uneven batches: the number of prompts in the whole
            minibatch, over the number of processes whose gradients are averaged.

    Raises ValueError for torch's DataParallel, which would cut the batch anywhere; and as losses and heads do.
    """
    if isinstance(model, nn.DataParallel):
        raise ValueError("DataParallel cuts batches between responses to one prompt: start with torchrun, or one GPU")
    tokens = batch.tokens()
    K = batch.responses_per_prompt
    P = (len(tokens.cu_seqlens) - 1) // K
    pairs_per_prompt = K * (K - 1) // 2

    def of_hidden(hidden: Tensor, head: Head) -> LinearLossOutput:
        return linear_loss(
            hidden.flatten(0, 1)[tokens.predicted_at],
            replace(head, temperature=head.temperature * temperature),
            tokens.labels,
            tokens.cu_seqlens,
            p3o_of_pairs(settings),
            responses_per_group=K,
            response_tensors=of_responses,
            divisor=(P if averaged_prompts is None else averaged_prompts) * pairs_per_prompt,
        )

    loss, metrics = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, of_hidden=of_hidden)
    counted = metrics["pairs"].clamp(min=1)
    means = {name: metrics[name] / counted for name in METRICS}
    return LinearLossOutput(loss, means | {"pairs": metrics["pairs"] / (P * pairs_per_prompt)})


def p3o_of_pairs(settings: P3OSettings) -> Callable[[Groups], tuple[Tensor, dict[str, Tensor]]]:
    """P3O's loss as an objective of `linear_loss`: the sum over the pairs whose two responses are not empty.

    Raises ValueError for clipping="token", whose mean is over tokens.
    """
    if settings.clipping == "token":
        raise ValueError('clipping="token" is a mean over tokens, not pairs; choose joint, separate or none')

    def objective(groups: Groups) -> tuple[Tensor, dict[str, Tensor]]:
        K = groups.responses_per_group
        first, second = torch.triu_indices(K, K, offset=1)

        def of_pairs(responses: Tensor) -> Tensor:
            return torch.stack([responses[:, first], responses[:, second]], dim=2).flatten(0, 1)

        logprobs = groups.logprobs
        old_logprobs = groups.tensors.get("old_logprobs", logprobs.detach())
        ref_logprobs = groups.tensors.get("ref_logprobs", old_logprobs)
        counts = of_pairs(groups.lengths > 0).all(dim=1)
        pairs = counts.sum()
        if not pairs:
            return 0 * logprobs.sum(), dict.fromkeys((*METRICS, "pairs"), torch.zeros_like(logprobs[:0].sum()))
        own, old, ref, rewards = (
            of_pairs(values)[counts] for values in (logprobs, old_logprobs, ref_logprobs, groups["rewards"])
        )
        loss, metrics = p3o_loss(own, old, ref, rewards, settings)
        return loss * pairs, {name: metrics[name] * pairs for name in METRICS} | {"pairs": pairs}

    return objective


@torch.no_grad()
def padded_logprobs(model: Callable[..., Tensor], batch: PaddedBatch, *, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of whole responses, [P, K] fp32, in the batch's order; 0 for an empty one."""
    tokens = batch.tokens()

    def of_hidden(hidden: Tensor, head: Head) -> Tensor:
        head = replace(head, temperature=head.temperature * temperature)
        return linear_logprobs(hidden.flatten(0, 1)[tokens.predicted_at], head, tokens.labels)

    logprobs = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, of_hidden=of_hidden)
    lengths = tokens.cu_seqlens.diff().to(logprobs.device)
    responses = torch.arange(len(lengths), device=logprobs.device).repeat_interleave(lengths)
    sums = logprobs.new_zeros(len(lengths)).index_add(0, responses, logprobs)
    return sums.view(-1, batch.responses_per_prompt)
