"""On-policy distillation: the reverse KL to a teacher, the reference, at each token of the policy's
own responses.

If the teacher sees a context that the policy does not, this is context distillation.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn

from fastp3o.objectives.base import LossAndMetrics, Microbatch, Objective, masked_tokens, with_count
from fastp3o.objectives.config.distillation import TeacherConfig
from fastp3o.packing.packed_row import PackedRow
from fastp3o.rewards.scaling import AbsoluteScaler
from fastp3o_kernels import Head, linear_distillation
from fastp3o_kernels.losses import k2


class Distillation(Objective):
    """The mean over tokens of KL(π(·|x, y<t) ‖ π_teacher(·|c, x, y<t)). The choice of y<t has no
    gradient.
    """

    def __init__(self, config: TeacherConfig):
        self.exact, self.scaler = config.kl == "exact", AbsoluteScaler(0.0, scale=False)

    @property
    def reads_old_first(self) -> bool:
        """The exact KL needs no log-probs of the labels."""
        return self.exact

    def divisor(self, row: PackedRow, loss_mask: Tensor | None) -> int:
        return masked_tokens(row, loss_mask)

    def loss(
        self,
        policy: nn.Module,
        microbatch: Microbatch,
        divisor: float | Tensor,
        *,
        first: bool = False,
    ) -> LossAndMetrics:
        from fastp3o.models.packed_model import label_logprobs

        row, mask = microbatch.row, microbatch.loss_mask
        teacher = self.teacher_states(row) if self.exact else None

        def token_losses(hidden: Tensor, head: Head) -> Tensor:
            if teacher is not None:
                return linear_distillation(hidden, head, *teacher)
            logprobs = label_logprobs(hidden, head, row)
            if first:
                microbatch.note(logprobs)
            # Its gradient is (log π − log π_teacher) ∇ log π.
            return k2(logprobs, microbatch.ref_token_logprobs)

        losses = policy(row, row.labeled_at, token_losses)
        mask = torch.ones_like(microbatch.rewards, dtype=torch.bool) if mask is None else mask
        counts = mask.flatten().repeat_interleave(row.cu_seqlens.diff(), output_size=len(losses))
        loss = losses.where(counts, 0.0).sum()
        return loss / divisor, with_count(
            {"teacher_kl" if self.exact else "k2": loss}, counts.sum()
        )

    def teacher_states(self, row: PackedRow) -> tuple[Tensor, Head]:
        """The teacher's hidden states that predict the labels, [N, D'], and a copy of its head: a
        model that is spread over processes, or offloaded, has its own only while it computes.
        """
        heads: list[Head] = []

        def keep(hidden: Tensor, head: Head) -> Tensor:
            heads[:] = heads or [deepcopy(head.detach())]
            return hidden

        (hidden,) = self.reference_values(
            [row], lambda teacher, row: teacher(row, row.labeled_at, keep)
        )
        return hidden, heads[0]
