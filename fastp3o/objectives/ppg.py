"""The pairwise policy gradient (arXiv 2310.00212, equation 6): P3O's gradient before any clipping."""

from dataclasses import dataclass, fields

from torch import nn

from fastp3o.config import objective_name, option
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.p3o import P3O, P3OConfig
from fastp3o_kernels import P3OLossOutput
from fastp3o_kernels.p3o.settings import described


@dataclass(frozen=True, kw_only=True)
class PPGConfig(P3OConfig):
    """PPG (arXiv 2310.00212, equation 6): P3O's gradient before clipping; one step a round."""

    objective: str = objective_name("ppg")
    clipping: str = described("none", "The gradient has nothing to clip.", choices=("none",))
    prompts_per_minibatch: int = option(0, "Prompts of a round's only optimizer step; 0: all of the round's.")
    inner_epochs: int = option(1, "A round's only pass: after a step the policy is another than the one that sampled.")

    def __post_init__(self) -> None:
        if not self.prompts_per_minibatch:
            object.__setattr__(self, "prompts_per_minibatch", self.prompts_per_update)
        super().__post_init__()
        for setting in fields(self):
            if setting.name in ("clip_range", "ratio_cap", "kl_reward"):
                unchanged = getattr(self, setting.name) == setting.default
                self.check(unchanged, setting.name, "left as it is, as all ratios are 1")
        self.check(self.inner_epochs == 1, "inner_epochs", "1, since the gradient is on-policy (p3o has more)")
        if self.minibatches_per_update != 1:
            raise ValueError(
                f"--prompts_per_minibatch ({self.prompts_per_minibatch}) must be --prompts_per_update "
                f"({self.prompts_per_update}): the gradient is on-policy, and a round has one step (p3o has more)"
            )

    def build(self) -> "PPG":
        return PPG(self)


class PPG(P3O):
    """P3O's loss where all ratios are 1."""

    def loss(self, policy: nn.Module, microbatch: Microbatch, *, on_policy: bool = True) -> P3OLossOutput:
        return super().loss(policy, microbatch, on_policy=True)
