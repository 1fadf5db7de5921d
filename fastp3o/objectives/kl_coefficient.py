"""The weight of the KL to the reference: fixed, or adapted so that the KL comes near a target."""

from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from fastp3o.config import option
from fastp3o.objectives.base import Microbatch, SumOverProcesses
from fastp3o.objectives.config import OnlineConfig

# Schulman et al. 2017, section 4: beyond this factor from the target, the coefficient changes by the other.
TOLERANCE = 1.5
CHANGE = 2.0


@dataclass(frozen=True, kw_only=True)
class KLConfig(OnlineConfig):
    """Of objectives with a penalty on the KL, each with its own default of the weight."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("kl_coef", "target_kl")

    kl_coef: float
    target_kl: float | None = option(
        None,
        "KL of whole responses to the reference, in nats, that kl_coef is adapted to before each update: halved where "
        "the rollouts' is below two thirds of it, doubled where it is above one and a half times (Schulman et al. "
        "2017). Without it kl_coef stays.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.kl_coef >= 0, "kl_coef", "0 or more")
        self.check(self.target_kl is None or self.target_kl > 0, "target_kl", "above 0")
        if self.target_kl and not self.kl_coef:
            raise ValueError("--target_kl adapts --kl_coef, which must be above 0 to begin with")


class KLCoefficient:
    """value: what the KL is multiplied by now. target: None where that stays."""

    def __init__(self, value: float, target: float | None):
        self.value, self.target = value, target

    def adapt(self, minibatches: list[list[Microbatch]], sum_over_processes: SumOverProcesses) -> None:
        """To the mean of log π_old(y|x) − log π_ref(y|x) over the rollouts of all processes."""
        if self.target is None:
            return
        log_ratios = [batch.old_logprobs - batch.ref_logprobs for batch in chain.from_iterable(minibatches)]
        sums = torch.stack([torch.stack([part.sum(), part.new_tensor(part.numel())]) for part in log_ratios]).sum(0)
        total, count = sum_over_processes(sums).tolist()
        kl = total / count
        if kl < self.target / TOLERANCE:
            self.value /= CHANGE
        elif kl > self.target * TOLERANCE:
            self.value *= CHANGE

    @property
    def parts(self) -> dict[str, Stateful]:
        """Of a state: none where nothing changes."""
        return {} if self.target is None else {"kl_coef": self}

    def metrics(self, like: Tensor) -> dict[str, Tensor]:
        """Of a loss: none where nothing changes."""
        return {} if self.target is None else {"kl_coef": like.detach().new_tensor(self.value)}

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.value = state_dict["value"]
