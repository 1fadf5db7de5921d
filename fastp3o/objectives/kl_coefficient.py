"""The weight of the KL to the reference: fixed, or adapted to bring the KL near a target."""

from typing import Any

# Schulman et al. 2017, section 4: beyond TOLERANCE times the target, the weight changes by the
# factor CHANGE.
TOLERANCE = 1.5
CHANGE = 2.0
# The weight stays within this factor of its first value: from farther away it would take long to
# come back.
FARTHEST = 1024.0
# Updates that the pace of the distance from the reference is averaged over, and for which it is
# taken to last.
MEMORY, FORESIGHT = 10, 100


class KLCoefficient:
    """value: the KL's weight now. target: the KL that it is adapted to; None keeps it fixed.

    The distance from the reference answers over many updates: while it is on its way to the target,
    the weight stays. kl: at the last update. pace: mean change of the KL from one update to the
    next, over the last ones, which is taken to last for FORESIGHT more. updates: number of changes
    so far.
    """

    def __init__(self, value: float, target: float | None):
        self.start = self.value = value
        self.target = target
        self.kl: float | None = None
        self.updates, self.pace = 0, 0.0

    def adapt(self, kl: float) -> None:
        """Adapts the weight to the KL of an update."""
        if self.target is None:
            return
        before, self.kl = self.kl, kl
        if before is not None:
            self.updates += 1
            self.pace += (kl - before - self.pace) / min(self.updates, MEMORY)
        expected = kl + FORESIGHT * self.pace
        # A first distance of 0 says nothing: nothing has been trained.
        if kl < self.target / TOLERANCE and expected < self.target and self.updates:
            self.value = max(self.value / CHANGE, self.start / FARTHEST)
        elif kl > self.target * TOLERANCE and expected > self.target:
            self.value = min(self.value * CHANGE, self.start * FARTHEST)

    def state_dict(self) -> dict[str, float | None]:
        return {
            "given": self.start,
            "value": self.value,
            "kl": self.kl,
            "updates": self.updates,
            "pace": self.pace,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A resumed run that gives another weight, or no target, starts again."""
        if self.target is not None and state_dict["given"] == self.start:
            self.value, self.kl = state_dict["value"], state_dict["kl"]
            self.updates, self.pace = state_dict["updates"], state_dict["pace"]
