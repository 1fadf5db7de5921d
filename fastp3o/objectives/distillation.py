"""On-policy distillation: the reverse KL to a teacher, the reference, at each token of the policy's own responses.

If the teacher sees a context that the policy does not, this is context distillation.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fastp3o.config import Condition, Needs, objective_name, option, options
from fastp3o.errors import UserError
from fastp3o.objectives.base import LossAndMetrics, Microbatch, Objective, masked_tokens, with_count
from fastp3o.objectives.config import OnlineConfig
from fastp3o.packing.packed_row import PackedRow
from fastp3o.rewards.scaling import AbsoluteScaler
from fastp3o_kernels import Head, linear_distillation
from fastp3o_kernels.losses import k2

OTHERS = Condition("objective", "another objective: distillation reads neither rewards nor ratios", lambda _: False)
REFUSED = "missing_eos_penalty length_penalty ngram_penalty overlong_margin dynamic_sampling sampler_ratio_cap"


@options
class DistillationConfig(OnlineConfig):
    """On-policy distillation (GKD, arXiv 2306.13649) of --reference, the teacher, or of what a context makes it say."""

    compares_with_old: ClassVar[bool] = False
    assumes_own_samples: ClassVar[bool] = False
    reads_rewards: ClassVar[bool] = False
    further_needs: ClassVar[Mapping[str, Needs]] = dict.fromkeys(REFUSED.split(), OTHERS)
    objective: str = objective_name("distillation")
    kl: Literal["exact", "sampled"] = option(
        "exact",
        "KL(policy || teacher) of a token. exact: over the vocabulary (GKD). sampled: log pi - log pi_teacher of the "
        "token is its negative reward in a policy gradient (Thinking Machines 2025; MiniLLM, arXiv 2306.08543).",
    )
    teacher_context: str | None = option(
        None,
        "Text before each prompt that the teacher alone sees (context distillation, arXiv 2112.00861, 2209.15189): "
        "before a chat's first message, too, but behind a beginning-of-sequence token. The text of a special token is "
        'that token, so it can be a message as the chat template writes it. A file\'s: "$(cat FILE)".',
    )
    reward: str = option("", "Only logged, as --reward of other objectives; by default minus the KL to the teacher.")
    prompts_per_minibatch: int = 0
    inner_epochs: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl == "sampled" and self.truncates:
            raise UserError("--kl sampled needs samples of the policy: no --top_k, --top_p or --min_p, or --kl exact")

    def build(self) -> "Distillation":
        return Distillation(self)


class Distillation(Objective):
    """The mean over tokens of KL(π(·|x, y<t) ‖ π_teacher(·|c, x, y<t)). The choice of y<t has no gradient."""

    def __init__(self, config: DistillationConfig):
        self.exact, self.scaler = config.kl == "exact", AbsoluteScaler(0.0, scale=False)

    def divisor(self, row: PackedRow, loss_mask: Tensor | None) -> int:
        return masked_tokens(row, loss_mask)

    def loss(self, policy: nn.Module, microbatch: Microbatch, divisor: float | Tensor) -> LossAndMetrics:
        from fastp3o.models.packed_model import label_logprobs

        row, mask = microbatch.row, microbatch.loss_mask
        teacher = self.teacher_states(row) if self.exact else None

        def token_losses(hidden: Tensor, head: Head) -> Tensor:
            if teacher is not None:
                return linear_distillation(hidden, head, *teacher)
            # Its gradient is (log π − log π_teacher) ∇ log π.
            return k2(label_logprobs(hidden, head, row), microbatch.ref_token_logprobs)

        losses = policy(row, row.labelled_at, token_losses)
        mask = torch.ones_like(microbatch.rewards, dtype=torch.bool) if mask is None else mask
        counts = mask.flatten().repeat_interleave(row.cu_seqlens.diff(), output_size=len(losses))
        loss = losses.where(counts, 0.0).sum()
        return loss / divisor, with_count({"teacher_kl" if self.exact else "k2": loss}, counts.sum())

    def teacher_states(self, row: PackedRow) -> tuple[Tensor, Head]:
        """The teacher's hidden states that predict the labels, [N, D'], and a copy of its head: a model that is spread
        over processes, or offloaded, has its own only while it computes.
        """
        heads: list[Head] = []

        def keep(hidden: Tensor, head: Head) -> Tensor:
            heads[:] = heads or [deepcopy(head.detach())]
            return hidden

        (hidden,) = self.reference_values([row], lambda teacher, row: teacher(row, row.labelled_at, keep))
        return hidden, heads[0]
