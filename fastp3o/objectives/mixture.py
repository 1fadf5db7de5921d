"""The settings of objectives whose responses, or some of them, a mixture of policy and reference samples."""

from dataclasses import dataclass

from fastp3o.config import option
from fastp3o.objectives.config import OnlineConfig


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(OnlineConfig):
    """The mixture π^(1 − β) π_ref^β, token by token."""

    mixture: float = option(
        0.0, "Beta: the reference's share in the mixture pi^(1 - beta) pi_ref^beta that samples responses; 0: none."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(0 <= self.mixture <= 1, "mixture", "within 0 and 1")
        if self.mixture and self.lora_rank and not self.reference:
            raise ValueError("--mixture samples from a reference of its own: with --lora_rank, name one by --reference")
        if self.mixture and self.offload:
            raise ValueError("--mixture and --offload exclude each other: the reference is sampled from, too")
        if self.mixture and (self.sampler != "engine" or self.compile_rollouts):
            raise ValueError("--mixture needs --sampler engine without --compile_rollouts")
