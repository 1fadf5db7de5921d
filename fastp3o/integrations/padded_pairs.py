"""P3O on any trainer's padded batch of responses, with a model whose head is exposed.

B = P K rows, K responses to each of P prompts; T positions; N response tokens, D hidden size.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastp3o_kernels import Head, P3OSettings, ResponseTokens, linear_p3o_loss, response_tokens

METRICS = ("ratio_mean", "clip_fraction", "advantage_mean_abs", "zero_gradient_fraction", "kl")


class PaddedBatch(NamedTuple):
    """Padded responses, as trainers hold them. input_ids, attention_mask: [B, T]. response_mask:
    [B, T], 1 at the responses' own tokens. responses_per_prompt: K; siblings are neighbors.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    responses_per_prompt: int

    def tokens(self) -> ResponseTokens:
        return response_tokens(
            self.input_ids, self.response_mask, responses_per_prompt=self.responses_per_prompt
        )


def padded_p3o_loss(
    model: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    batch: PaddedBatch,
    rewards: Tensor,
    settings: P3OSettings,
    *,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    temperature: float = 1.0,
    divisor: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss over the pairs of a batch, and METRICS.

    A pair with an empty response (a truncated completion that is masked) has no gradient and stays
    in the mean, as masked completions stay in TRL's: batches of equally many prompts weigh the
    same. `metrics["pairs"]` is the share of the other pairs; the other metrics are means over
    these.

    Args:
        model: after `expose_head`, in any wrapper.
        rewards: [P, K].
        settings: clipping is "joint", "separate" or "none".
        old_logprobs: [P, K], the log-probs by the policy that sampled; None if it is this policy.
        ref_logprobs: [P, K], those by the reference; None if it is the policy that sampled.
        temperature: the sampler's, which divides logits.
        divisor: divides the sum over prompts; P by default. For uneven batches it is the number of
            prompts in the whole minibatch, divided by the number of processes whose gradients are
            averaged.

    Raises ValueError for torch's DataParallel, which would cut the batch anywhere; and as
    `linear_p3o_loss` does.
    """
    if isinstance(model, nn.DataParallel):
        raise ValueError(
            "DataParallel cuts batches between responses to one prompt: start with torchrun, or one GPU"
        )
    if settings.clipping == "token":
        raise ValueError(
            'clipping="token" is a mean over tokens, not pairs; choose joint, separate or none'
        )
    ref = old_logprobs if ref_logprobs is None else ref_logprobs
    is_reference = ref is None
    if ref is None:
        # The KL to the policy itself is 0, and without a KL every reference has the same gradient.
        ref, settings = torch.zeros_like(rewards), replace(settings, kl_coef=0.0)

    tokens = batch.tokens()

    def head_loss(hidden: Tensor, head: Head) -> tuple[Tensor, dict[str, Tensor]]:
        predicting = hidden.flatten(0, 1)[tokens.predicted_at]
        constants = (old_logprobs, ref, rewards)
        head = replace(head, temperature=head.temperature * temperature)
        loss, metrics, _ = linear_p3o_loss(
            predicting,
            head,
            tokens.labels,
            tokens.cu_seqlens,
            *constants,
            settings,
            divisor=divisor,
        )
        if is_reference:
            # Against itself the policy prefers no response.
            loss, metrics = loss - loss.detach(), metrics | {"kl": torch.zeros_like(metrics["kl"])}
        K = batch.responses_per_prompt
        counted = (tokens.cu_seqlens.diff() > 0).view(-1, K).sum(dim=1)
        pairs = (counted * (counted - 1) / (K * (K - 1))).mean()
        return loss, {name: metrics[name] for name in METRICS} | {"pairs": pairs.to(loss.device)}

    return model(
        batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, head_loss=head_loss
    )
