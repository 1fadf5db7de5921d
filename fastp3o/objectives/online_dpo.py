"""Online DPO (Guo et al. 2024), as in the P3O paper: rewards label fresh responses, DPO's loss learns the labels."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastp3o.config import objective_name, option
from fastp3o.objectives.config import OnlineConfig
from fastp3o.objectives.labelled_pairs import LabelledPairs
from fastp3o_kernels.head.groups import Groups
from fastp3o_kernels.losses import dpo


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(OnlineConfig):
    """Online DPO (arXiv 2402.04792): of two fresh responses the one with the higher reward is the chosen one."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("kl_coef",)

    objective: str = objective_name("online_dpo")
    kl_coef: float = option(0.1, "Beta of DPO's implicit reward, the weight of the KL to the reference.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.kl_coef > 0, "kl_coef", "above 0")

    def build(self) -> "OnlineDPO":
        return OnlineDPO(self)


class OnlineDPO(LabelledPairs):
    """−log σ(β Δ), Δ the difference of log π/π_ref (Rafailov et al. 2023, equation 7)."""

    config: OnlineDPOConfig

    def losses(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return dpo(logprobs, ref_logprobs, beta=self.config.kl_coef)

    def anchor(self, groups: Groups) -> Tensor:
        return groups["ref"]


@dataclass(frozen=True, kw_only=True)
class BPOConfig(OnlineDPOConfig):
    """BPO (arXiv 2406.12168): online DPO against the policy that sampled."""

    objective: str = objective_name("bpo")
    kl_coef: float = option(0.1, "Beta of DPO's implicit reward, the weight of the KL to the policy that sampled.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference_moves:
            raise ValueError(
                "--reference_every and --reference_decay change nothing: the loss compares with the policy that sampled"
            )

    def build(self) -> "BPO":
        return BPO(self)


class BPO(OnlineDPO):
    """DPO's loss against the policy that sampled, another one in every update; evaluations keep the reference."""

    def anchor(self, groups: Groups) -> Tensor:
        return groups["old"]
