"""How tokens are chosen from the policy's distribution."""

from dataclasses import dataclass

from fastp3o_kernels.decoding.sampling import check_settings


@dataclass(frozen=True)
class SamplingSettings:
    """By default tokens are samples of the policy itself, which is what P3O's ratios and KL are about.

    temperature: divides the logits. top_k: only the k most likely tokens, 0 for all. top_p: only the most likely tokens
    that together have this probability. min_p: only tokens with this share of the most likely one's probability.

    Raises ValueError for a setting out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        check_settings(**vars(self))


POLICY_ITSELF = SamplingSettings()
