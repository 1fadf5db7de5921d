"""Online DPO (Guo et al. 2024), as in the P3O paper: rewards label fresh responses, DPO's loss learns the labels."""

import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from fastp3o.models.packed_model import PackedModel, scored_logprobs
from fastp3o.objectives.config import OnlineDPOConfig
from fastp3o.rewards.scaling import AbsoluteScaler, differences
from fastp3o.training.minibatches import Pairs
from fastp3o_kernels import sequence_logprobs


class OnlineDPO:
    """Online DPO; an Algorithm."""

    averages_tokens = False
    clip_range = None

    def __init__(self, config: OnlineDPOConfig):
        self.config = config
        self.learning_rates = {}
        # The loss reads which reward is higher, nothing else.
        self.scaler = AbsoluteScaler(0.0, scale=False)

    def add_to(self, policy: PackedModel) -> None:
        """There is no critic."""

    def prepare(self, accelerator: Accelerator, policy: nn.Module, minibatches: list[list[Pairs]]) -> list[list[Pairs]]:
        """Rollouts, their rewards and reference log-probs are all that the loss takes."""
        return minibatches

    def loss(self, policy: nn.Module, pairs: Pairs) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = sequence_logprobs(scored_logprobs(policy, pairs.row), pairs.row.cu_seqlens)
        log_ratios = logprobs.view_as(pairs.ref_logprobs) - pairs.ref_logprobs
        return dpo_loss(log_ratios, pairs.rewards, kl_coef=self.config.kl_coef)


def dpo_loss(log_ratios: Tensor, rewards: Tensor, *, kl_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
    """−log σ(β [log π(y_w) − log π_ref(y_w) − log π(y_l) + log π_ref(y_l)]), Rafailov et al. 2023, equation 7.

    log_ratios: log π(y|x) − log π_ref(y|x), [P, K] fp32. rewards: [P, K] fp32; y_w is the response with the higher one.
    The mean over all K (K − 1) / 2 pairs of all prompts; equal rewards choose none and count as zero.
    """
    labels = differences(rewards).sign()
    margins = labels * kl_coef * differences(log_ratios)
    loss = (labels.abs() * -F.logsigmoid(margins)).mean()
    metrics = {"accuracy": (margins > 0).float().mean(), "tied": (labels == 0).float().mean(), "margin": margins.mean()}
    return loss, {name: value.detach() for name, value in metrics.items()}
