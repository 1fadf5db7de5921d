"""Online DPO (Guo et al. 2024), as in the P3O paper: rewards label fresh responses, DPO's loss learns the labels."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fastp3o.config import option
from fastp3o.models.packed_model import PackedModel, scored_logprobs
from fastp3o.objectives.base import LossAndMetrics, Microbatch, SumOverProcesses
from fastp3o.objectives.config import OnlineConfig
from fastp3o.rewards.scaling import AbsoluteScaler, differences
from fastp3o_kernels import sequence_logprobs


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(OnlineConfig):
    """Online DPO: of two fresh responses the one with the higher reward is the chosen one."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("kl_coef",)

    kl_coef: float = option(0.1, "Beta of DPO's implicit reward, the weight of the KL to the reference.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.kl_coef > 0, "kl_coef", "above 0")

    def objective(self) -> "OnlineDPO":
        return OnlineDPO(self)


class OnlineDPO:
    """An Objective: of two fresh responses the one with the higher reward is the chosen one."""

    averages_tokens = False
    clip_range = None

    def __init__(self, config: OnlineDPOConfig):
        self.config = config
        self.learning_rates: dict[str, float] = {}
        # The loss reads which reward is higher, nothing else.
        self.scaler = AbsoluteScaler(0.0, scale=False)

    def add_to(self, policy: PackedModel) -> None:
        """There is no critic."""

    def prepare(
        self, policy: nn.Module, minibatches: list[list[Microbatch]], sum_over_processes: SumOverProcesses
    ) -> list[list[Microbatch]]:
        """Rewards and reference log-probs are all that the loss takes."""
        return minibatches

    def loss(self, policy: nn.Module, microbatch: Microbatch) -> LossAndMetrics:
        row, ref_logprobs = microbatch.row, microbatch.ref_logprobs
        logprobs = sequence_logprobs(scored_logprobs(policy, row), row.cu_seqlens)
        log_ratios = logprobs.view_as(ref_logprobs) - ref_logprobs
        return dpo_loss(log_ratios, microbatch.rewards, kl_coef=self.config.kl_coef)


def dpo_loss(log_ratios: Tensor, rewards: Tensor, *, kl_coef: float) -> LossAndMetrics:
    """−log σ(β [log π(y_w) − log π_ref(y_w) − log π(y_l) + log π_ref(y_l)]), Rafailov et al. 2023, equation 7.

    log_ratios: log π(y|x) − log π_ref(y|x), [P, K] fp32. rewards: [P, K] fp32; y_w is the response with the higher one.
    The mean over all K (K − 1) / 2 pairs of all prompts; equal rewards choose none and count as zero.
    """
    labels = differences(rewards).sign()
    margins = labels * kl_coef * differences(log_ratios)
    loss = (labels.abs() * -F.logsigmoid(margins)).mean()
    metrics = {"accuracy": (margins > 0).float().mean(), "tied": (labels == 0).float().mean(), "margin": margins.mean()}
    return loss, {name: value.detach() for name, value in metrics.items()}
