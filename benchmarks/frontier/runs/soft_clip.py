"""Joint P3O with a soft clip: pairs that have moved the right way keep a share of their gradient."""

from fastp3o.objectives.base import GroupwiseObjective, LossAndMetrics
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.objectives.kl_coefficient import KLCoefficient
from fastp3o.rewards.scaling import differences, pairs, scaler_of_differences
from fastp3o_kernels import Groups
from fastp3o_kernels.losses import truncated_ratios


class SoftClipConfig(P3OConfig):
    def build(self) -> "SoftClip":
        return SoftClip(self)


class SoftClip(GroupwiseObjective):
    """The weight of a pair is c / (1 + (x / ε)²), x ≥ 0 how far its log-ratio has moved as its reward says."""

    kl: KLCoefficient

    def __init__(self, config: P3OConfig):
        self.config, self.kl = config, KLCoefficient(config.kl_coef)
        self.scaler = scaler_of_differences(config.reward_scaling, config.reward_clip)

    def sums(self, groups: Groups) -> LossAndMetrics:
        now, old, cap = groups.logprobs.detach(), groups["old"], self.config.ratio_cap
        worth = differences(groups["rewards"] - self.kl.value * (now - groups["ref"]))
        moved = (worth.sign() * differences(now - old)).clamp(min=0)
        weights = truncated_ratios(pairs(now - old).sum(-1), cap).clamp(min=1 / cap)
        weights = weights / (1 + (moved / self.config.clip_range) ** 2)
        return -(weights * worth * differences(groups.logprobs)).mean(1).sum() / 2, {}
