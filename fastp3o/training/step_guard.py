"""Keeps an optimizer step whose loss or gradient is not finite from moving the model, while the host runs ahead.

A host that asks after every step waits for the device every time. So the device decides, and the host reads what
became of its steps once an update.
"""

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from fastp3o.training.processes import NotFiniteError, not_finite_error, sum_over_processes

# Gradients of a mean over pairs are small; torch's own start of 2**16 loses more first steps.
FIRST_SCALE = 2.0**12
# The rule of torch.amp.GradScaler.
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


class StepGuard:
    """Decides on the device which optimizer steps move nothing.

    A failure is a loss or a gradient that is NaN or infinite. From its step on none moves anything, so the model is the
    one before it when `require_finite` raises. In fp16 an infinite gradient has overflowed: its step alone moves
    nothing, and the scale of the loss is halved; a scale below 1 is a failure.

    scale: of fp16's loss, 0-d fp32; None in other precisions.
    """

    def __init__(self, accelerator: Accelerator, *, scaled: bool):
        self.accelerator = accelerator
        # The values of the first failure that were not finite, infinite if no scale was low enough; 0 without one.
        self.failure = torch.zeros((), device=accelerator.device)
        self.made = torch.zeros((), device=accelerator.device)  # steps before it
        self.scale: Tensor | None = None
        if scaled:
            self.set_scale(FIRST_SCALE, finite_steps=0)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scale is None else loss * self.scale

    def skips(self, loss: Tensor, norms: Tensor) -> Tensor:
        """Whether a step must move nothing, 1.0 or 0.0, 0-d.

        loss: 0-d, this process's. norms: of the gradients, the same on all processes.
        """
        # 0 times a value is 0 only if it is finite.
        broken = (torch.cat([loss.detach().float()[None], norms]) * 0 != 0).float()
        broken = sum_over_processes(self.accelerator, broken)
        if self.scale is None:
            failure, overflow = broken.sum(), None
        else:
            overflow = broken[1:].sum().clamp(max=1.0)
            torch._amp_update_scale_(self.scale, self.finite_steps, overflow, GROWTH, BACKOFF, INTERVAL)
            failure = torch.where(self.scale < 1, math.inf, broken[0])
        self.failure = torch.where(self.failure > 0, self.failure, failure)
        failed = self.failure.clamp(max=1.0)
        self.made = self.made + (1 - failed)
        return failed if overflow is None else torch.maximum(failed, overflow)

    def numbers(self) -> Tensor:
        """What `read` takes: the number of steps before a failure, the failure, the loss scale's state; 1-d fp32."""
        return torch.stack([self.made, self.failure, *self.counters()])

    def read(self, numbers: list[float]) -> tuple[int, NotFiniteError | None]:
        """The number of steps that have moved something, and the error of a failure, None without one."""
        made, failure, *self.known = numbers
        if math.isinf(failure):
            return int(made), NotFiniteError("the gradient is NaN or infinite at any scale of the loss")
        what = "the loss or the gradient" if self.scale is None else "the loss"
        return int(made), not_finite_error(what, int(failure)) if failure else None

    def counters(self) -> list[Tensor]:
        return [] if self.scale is None else [self.scale, self.finite_steps.float()]

    def state_dict(self) -> dict[str, Any]:
        """The loss scale as the host last read it, in the layout of torch's GradScaler; empty without one."""
        if self.scale is None:
            return {}
        scale, finite_steps = self.known
        rule = {"growth_factor": GROWTH, "backoff_factor": BACKOFF, "growth_interval": INTERVAL}
        return {"scale": scale, **rule, "_growth_tracker": int(finite_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the loss scale. Precisions without one ignore it."""
        if self.scale is not None and state:
            self.set_scale(state["scale"], finite_steps=state["_growth_tracker"])

    def set_scale(self, scale: float, *, finite_steps: int) -> None:
        """finite_steps: since the scale last changed."""
        device = self.accelerator.device
        self.known = [scale, finite_steps]
        self.scale = torch.full((), scale, device=device)
        self.finite_steps = torch.full((), finite_steps, dtype=torch.int32, device=device)
