"""Losses of a prompt's responses that are plain functions of their log-probs: one pass of the fused head for all.

P prompts with K responses each and N scored tokens of a packed row.
"""

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from fastp3o.objectives.base import LossAndMetrics, Microbatch
from fastp3o_kernels import Head
from fastp3o_kernels.head.linear_loss import Objective as OfGroups
from fastp3o_kernels.head.linear_loss import linear_loss


def groupwise_loss(
    policy: nn.Module,
    microbatch: Microbatch,
    of_groups: OfGroups,
    *,
    of_responses: Mapping[str, Tensor] | None = None,
    outputs: Collection[str] = (),
    divisor: float,
    units: float | Tensor,
) -> LossAndMetrics:
    """The loss that `of_groups` sums over some prompts, divided by `divisor`, and what it sums beside it over tokens,
    responses or pairs, divided by `units`, the number of those that count or 1.

    It finds `old_tokens`, `ref_tokens` [n], `old`, `ref`, `rewards`, `counted` [P, K], and what is in of_responses.
    """
    row = microbatch.row
    tokens = {"old_tokens": microbatch.old_token_logprobs, "ref_tokens": microbatch.ref_token_logprobs}
    responses = {
        "old": microbatch.old_logprobs,
        "ref": microbatch.ref_logprobs,
        "rewards": microbatch.rewards,
        "counted": microbatch.counted_responses(),
        **(of_responses or {}),
    }

    def of_hidden(hidden: Tensor, head: Head) -> LossAndMetrics:
        return linear_loss(
            hidden,
            head,
            row.labels,
            row.cu_seqlens_on_host,
            of_groups,
            responses_per_group=microbatch.rewards.shape[1],
            of_tokens=tokens,
            of_responses=responses,
            outputs=outputs,
            divisor=divisor,
        )

    loss, metrics = policy(row, row.scored_at, of_hidden)
    return loss, {name: metric / units for name, metric in metrics.items()}
