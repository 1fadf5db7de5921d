"""Weights of KLs, fixed or adapted so that the KL comes near a target: to the reference, and to the policy before an
update.
"""

from typing import Any

# Schulman et al. 2017, section 4: beyond TOLERANCE times the target, the weight changes by the factor CHANGE.
TOLERANCE = 1.5
CHANGE = 2.0
# The weight stays within this factor of its first value: from farther away it would take long to come back.
FARTHEST = 1024.0
# Updates that the KL's pace is averaged over, and updates for which it is taken to last.
MEMORY, FORESIGHT = 10, 100


class KLCoefficient:
    """value: the KL's weight now. target: the KL that it is adapted to, in nats per response; None keeps it fixed.

    Schulman's KL is that of one step, which the weight decides. This one is the distance from the reference, which
    answers over many updates: while it is on its way to the target, the weight stays.

    pace: mean change of the KL from one update to the next, over the last ones. updates: number of changes so far.
    """

    def __init__(self, value: float, target: float | None):
        self.given = self.value = value
        self.target = target
        self.kl: float | None = None  # at the update before
        self.updates, self.pace = 0, 0.0

    def adapt(self, kl: float) -> None:
        """Adapts the weight to the KL of an update's rollouts, in nats per response."""
        if self.target is None:
            return
        before, self.kl = self.kl, kl
        if before is not None:
            self.updates += 1
            self.pace += (kl - before - self.pace) / min(self.updates, MEMORY)
        expected = kl + FORESIGHT * self.pace
        # A first KL of 0 says nothing: nothing has been trained.
        if kl < self.target / TOLERANCE and expected < self.target and self.updates:
            self.value = max(self.value / CHANGE, self.given / FARTHEST)
        elif kl > self.target * TOLERANCE and expected > self.target:
            self.value = min(self.value * CHANGE, self.given * FARTHEST)

    def state_dict(self) -> dict[str, float | None]:
        return {"given": self.given, "value": self.value, "kl": self.kl, "updates": self.updates, "pace": self.pace}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A resumed run that gives another weight, or no target, starts anew."""
        if self.target is not None and state_dict["given"] == self.given:
            self.value, self.kl = state_dict["value"], state_dict["kl"]
            self.updates, self.pace = state_dict["updates"], state_dict["pace"]


class StepKLCoefficient:
    """The weight of the KL from the policy before an update to the one after it (Schulman et al. 2017, section 4).

    value: the weight now. target: of the KL, in nats per token; None keeps the weight. kl: after the last update. used:
    the weight in it.
    """

    def __init__(self, value: float, target: float | None):
        self.given = self.value = self.used = value
        self.target = target
        self.kl: float | None = None

    def adapt(self, kl: float) -> None:
        """Halves or doubles the weight by the KL that an update has made, in nats per token."""
        if self.target is None:
            return
        self.kl, self.used = kl, self.value
        if kl < self.target / TOLERANCE:
            self.value = max(self.value / CHANGE, self.given / FARTHEST)
        elif kl > self.target * TOLERANCE:
            self.value = min(self.value * CHANGE, self.given * FARTHEST)

    def state_dict(self) -> dict[str, float]:
        return {"given": self.given, "value": self.value}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """A resumed run that gives another weight, or no target, starts anew."""
        if self.target is not None and state_dict["given"] == self.given:
            self.value = state_dict["value"]
