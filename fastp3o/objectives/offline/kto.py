"""Kahneman-Tversky optimization (arXiv 2402.01306): single responses, each desirable or not."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastp3o.config import objective_name, option
from fastp3o.objectives.offline.config import PreferenceConfig, square_kl
from fastp3o_kernels import Groups
from fastp3o_kernels.losses import kto


@dataclass(frozen=True, kw_only=True)
class KTOConfig(PreferenceConfig):
    """Kahneman-Tversky optimization (arXiv 2402.01306): single responses, each desirable or not.

    z0, the reference point, is the mean of log π/π_ref over a batch's prompts, each with the response to another.
    """

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("beta", "desirable_weight", "undesirable_weight")

    objective: str = objective_name("kto")
    beta: float = option(0.1, "Beta: how fast utility saturates with distance from the reference point (paper: 0.1).")
    desirable_weight: float = option(
        1.0,
        "Weight of desirable responses. The paper has it times their number 1 to 4/3 times as large as the same of "
        "undesirable ones.",
    )
    undesirable_weight: float = option(1.0, "Weight of undesirable responses.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.beta > 0, "beta", "above 0")
        self.check(self.desirable_weight > 0, "desirable_weight", "above 0")
        self.check(self.undesirable_weight > 0, "undesirable_weight", "above 0")

    def losses(self, responses: Groups) -> Tensor:
        """`responses["desirable"]`: bool, and `responses["reference_point"]`: z0, both [P, 1]."""
        return kto(
            self.logprobs(responses),
            self.ref_logprobs(responses),
            responses["desirable"],
            responses["reference_point"],
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )

    def metrics(self, responses: Groups) -> dict[str, Tensor]:
        """Of log π/π_ref, in nats per response:

        accuracy: 1 where it is on the right side of z0, a half where it is z0. log_ratio_desirable,
        log_ratio_undesirable: means over the responses of a kind; 0 where a batch has none. margin: their difference.
        desirable: the share of that kind. reference_point: z0. k2: see `square_kl`.

        `responses["share"]`, [P, 1]: that of a response's kind in the batch.
        """
        desirable = responses["desirable"]
        log_ratios = responses.logprobs - responses["reference"]
        sides = (log_ratios - responses["reference_point"]).sign()
        of_kind = log_ratios / responses["share"]
        of_desirable, of_undesirable = ((of_kind * kind).sum() for kind in (desirable, ~desirable))
        return {
            "accuracy": ((sides.where(desirable, -sides) + 1) / 2).sum(),
            "margin": of_desirable - of_undesirable,
            "log_ratio_desirable": of_desirable,
            "log_ratio_undesirable": of_undesirable,
            "desirable": desirable.float().sum(),
            "reference_point": responses["reference_point"].sum(),
            "k2": square_kl(responses).sum(),
        }
