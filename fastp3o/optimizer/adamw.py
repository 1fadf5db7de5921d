"""Fused AdamW that scales and clips gradients as it reads them."""

import torch
from torch import Tensor, nn


class DividingAdamW(torch.optim.AdamW):
    """Fused AdamW that divides gradients as it reads them, so that scaling and clipping take no
    pass of their own.
    """

    @torch.no_grad()
    def step(self, divisors: Tensor, skip: Tensor) -> None:  # type: ignore[override]
        """Makes a step. divisors: [groups] fp32, of each group's gradients. skip: 1.0 to move
        nothing, else 0.0.
        """
        groups, self.found_inf = self.param_groups, skip
        try:
            # torch's AdamW takes one divisor for all of its groups.
            for group, self.grad_scale in zip(groups, divisors, strict=True):
                self.param_groups = [group]
                super().step()
        finally:
            self.param_groups = groups

    def begin(self, parameter: nn.Parameter) -> None:
        """Makes the state of a parameter that has made no step."""
        step = torch.zeros((), device=parameter.device)
        moments = map(torch.zeros_like, [parameter] * 2)
        self.state[parameter] = dict(
            zip(("step", "exp_avg", "exp_avg_sq"), (step, *moments), strict=True)
        )
