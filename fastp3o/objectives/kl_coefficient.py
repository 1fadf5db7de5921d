"""The weight of the KL to the reference: fixed, or adapted so that the KL comes near a target."""

from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch.distributed.checkpoint.stateful import Stateful

from fastp3o.config import option
from fastp3o.objectives.base import Microbatch, SumOverProcesses
from fastp3o.objectives.config import OnlineConfig

# Schulman et al. 2017, section 4: beyond this factor from the target, the coefficient changes by the other.
TOLERANCE = 1.5
CHANGE = 2.0
# How far the coefficient goes from where it began: farther, it would take long to come back.
FARTHEST = 1024.0
# Updates over which the KL's pace counts, and for which it is thought to last.
MEMORY, FORESIGHT = 10, 100


@dataclass(frozen=True, kw_only=True)
class KLConfig(OnlineConfig):
    """Of objectives with a penalty on the KL, each with its own default of the weight."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("kl_coef", "target_kl")

    kl_coef: float
    target_kl: float | None = option(
        None,
        "KL of whole responses to the reference, in nats, that kl_coef is adapted to before each update: halved where "
        "the rollouts' is below two thirds of it, doubled where it is above one and a half times (Schulman et al. "
        "2017), but while it is on its way there. Without it kl_coef stays as it is given.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.kl_coef >= 0, "kl_coef", "0 or more")
        self.check(self.target_kl is None or self.target_kl > 0, "target_kl", "above 0")
        if self.target_kl and not self.kl_coef:
            raise ValueError("--target_kl adapts --kl_coef, which must be above 0 to begin with")


# What a resumed run goes on with.
ADAPTED = ("value", "kl", "updates", "pace")


class KLCoefficient:
    """value: what the KL is multiplied by now. target: None where that stays.

    Schulman's KL is that of one step, which its coefficient decides. This one is that of the way from the reference,
    and answers over many updates: while it is on its way to the target, the coefficient stays.

    updates, pace: how many differences of the KL from one update to the next there were, and their mean, of the last
    ones.
    """

    def __init__(self, value: float, target: float | None):
        self.given = self.value = value
        self.target = target
        self.kl: float | None = None  # of the update before
        self.updates, self.pace = 0, 0.0

    def adapt(self, minibatches: list[list[Microbatch]], sum_over_processes: SumOverProcesses) -> None:
        """To the mean of log π_old(y|x) − log π_ref(y|x) over the rollouts of all processes."""
        if self.target is None:
            return
        log_ratios = [batch.old_logprobs - batch.ref_logprobs for batch in chain.from_iterable(minibatches)]
        sums = torch.stack([torch.stack([part.sum(), part.new_tensor(part.numel())]) for part in log_ratios]).sum(0)
        total, count = sum_over_processes(sums).tolist()
        before, self.kl = self.kl, total / count
        if before is not None:
            self.updates += 1
            self.pace += (self.kl - before - self.pace) / min(self.updates, MEMORY)
        expected = self.kl + FORESIGHT * self.pace
        # A first KL of 0 says nothing: nothing has been trained.
        if self.kl < self.target / TOLERANCE and expected < self.target and self.updates:
            self.value = max(self.value / CHANGE, self.given / FARTHEST)
        elif self.kl > self.target * TOLERANCE and expected > self.target:
            self.value = min(self.value * CHANGE, self.given * FARTHEST)

    @property
    def parts(self) -> dict[str, Stateful]:
        """Of a state."""
        return {"kl_coef": self}

    @property
    def adapted(self) -> dict[str, float]:
        """For a report: nothing where nothing changes."""
        return {} if self.target is None else {"kl_coef": self.value}

    def state_dict(self) -> dict[str, float | None]:
        return {name: getattr(self, name) for name in ("given", *ADAPTED)}

    def load_state_dict(self, state_dict: dict[str, float | None]) -> None:
        """A coefficient that is given anew begins anew."""
        if self.target is not None and state_dict["given"] == self.given:
            for name in ADAPTED:
                setattr(self, name, state_dict[name])
