"""Group sequence policy optimization (arXiv 2507.18071): GRPO's advantages, one clipped ratio for each response."""

from dataclasses import dataclass, field

from torch import Tensor

from fastp3o.config import objective_name, option
from fastp3o.objectives.grpo import GRPO, ClippedConfig
from fastp3o.objectives.policy_gradient import KL_ESTIMATOR
from fastp3o_kernels.head.groups import Groups


@dataclass(frozen=True, kw_only=True)
class GSPOConfig(ClippedConfig):
    """GSPO (arXiv 2507.18071): the geometric mean of the ratios of a response's tokens is clipped."""

    objective: str = objective_name("gspo")
    clip_low: float = option(3e-4, "Ratios count down to 1 − clip_low (arXiv 2507.18071: 0.0003).")
    clip_high: float = option(4e-4, "Ratios count up to 1 + clip_high (arXiv 2507.18071: 0.0004).")
    kl_coef: float = option(0.0, "Beta, the weight of the KL to the reference (arXiv 2507.18071: none).")
    kl_estimator: str = field(default="k3", metadata=KL_ESTIMATOR)

    def build(self) -> "GSPO":
        return GSPO(self, loss_mean="sequence")


class GSPO(GRPO):
    """The clipped ratio of a response: the geometric mean of its tokens'."""

    config: GSPOConfig

    def clip_range(self, length: float) -> float | None:
        """That of the mean over tokens, times these."""
        return length * min(self.config.clip_low, self.config.clip_high)

    def losses(self, groups: Groups) -> Tensor:
        means = groups.means(groups.token_logprobs), groups.means(groups["old_tokens"])
        return self.clipped(*means, groups["advantages"])

    def metrics(self, groups: Groups) -> dict[str, Tensor]:
        return self.ratio_metrics(groups, groups.means(groups.token_logprobs - groups["old_tokens"]))
