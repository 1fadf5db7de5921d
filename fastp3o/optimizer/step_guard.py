"""Decides on the device which optimizer steps move nothing, and the scale of fp16's loss."""

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from fastp3o.runtime.finiteness import NotFiniteError, not_finite_error
from fastp3o.runtime.processes import sum_over_processes

# Gradients of a mean over pairs are small; torch's own start of 2**16 loses more first steps.
FIRST_SCALE = 2.0**12
# The rule of torch.amp.GradScaler.
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


class StepGuard:
    """Decides on the device which optimizer steps move nothing. A host that asked after each would
    wait for the device.

    A failure is a loss or a gradient that is NaN or infinite. From its step on none moves anything,
    so the model is the one before it when `require_finite` raises. In fp16 an infinite gradient has
    overflowed: its step alone moves nothing, and the loss's scale is halved; a scale below 1 is a
    failure. scale: of fp16's loss, 0-d fp32, or None.
    """

    def __init__(self, accelerator: Accelerator, *, scaled: bool):
        self.accelerator = accelerator
        # The values of the first failure that were not finite, infinite if no scale was low enough;
        # 0 without one.
        self.failure = torch.zeros((), device=accelerator.device)
        self.lost = torch.zeros((), device=accelerator.device)  # steps from that one on
        self.scale: Tensor | None = None
        if scaled:
            self.set_scale(FIRST_SCALE, finite_steps=0)

    def skips(self, loss: Tensor, norms: Tensor) -> Tensor:
        """1.0 if a step must move nothing, else 0.0. loss: 0-d, this process's. norms: of all
        processes' gradients.
        """
        # 0 times a value is 0 only if it is finite.
        broken = (torch.cat([loss.detach().float()[None], norms]) * 0 != 0).float()
        broken = sum_over_processes(self.accelerator, broken)
        if self.scale is None:
            failure, overflow = broken.sum(), None
        else:
            overflow = broken[1:].sum().clamp(max=1.0)
            torch._amp_update_scale_(
                self.scale, self.finite_steps, overflow, GROWTH, BACKOFF, INTERVAL
            )
            failure = torch.where(self.scale < 1, math.inf, broken[0])
        self.failure = torch.where(self.failure > 0, self.failure, failure)
        failed = self.failure.clamp(max=1.0)
        self.lost += failed
        return failed if overflow is None else torch.maximum(failed, overflow)

    def numbers(self) -> Tensor:
        """The numbers that `read` takes: the steps that a failure has lost, the failure, the loss
        scale's state; 1-d fp32.
        """
        scale = [] if self.scale is None else [self.scale, self.finite_steps.float()]
        return torch.stack([self.lost, self.failure, *scale])

    def read(self, numbers: list[float]) -> tuple[int, NotFiniteError | None]:
        """The number of steps that a failure has lost, and its error, None without one."""
        lost, failure, *self.scale_read = numbers
        if math.isinf(failure):
            return int(lost), NotFiniteError(
                "the gradient is NaN or infinite at any scale of the loss"
            )
        what = "the loss or the gradient" if self.scale is None else "the loss"
        return int(lost), not_finite_error(what, int(failure)) if failure else None

    def state_dict(self) -> dict[str, Any]:
        """The loss scale as the host last read it; empty without one."""
        if self.scale is None:
            return {}
        scale, finite_steps = self.scale_read
        return {"scale": scale, "finite_steps": int(finite_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the loss scale. Precisions without one ignore it."""
        if self.scale is not None and state:
            self.set_scale(state["scale"], finite_steps=state["finite_steps"])

    def set_scale(self, scale: float, *, finite_steps: int) -> None:
        """finite_steps: since the scale last changed."""
        device = self.accelerator.device
        self.scale_read = [scale, float(finite_steps)]
        self.scale = torch.full((), scale, device=device)
        self.finite_steps = torch.full((), finite_steps, dtype=torch.int32, device=device)
