"""AdamW with moments in 8 bits, by bitsandbytes (arXiv 2110.02861), for one process."""

from collections.abc import Sequence
from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor, nn


class DividingAdamW8bit(AdamW8bit):  # type: ignore[misc,unused-ignore]
    """Steps as those of `fastp3o.optimizer.DividingAdamW`.

    embeddings: parameters whose moments stay in fp32, as transformers' Trainer has them.
    """

    kinds = ("step", "state1", "state2", "absmax1", "absmax2")  # what a saved state has: quantiles are constants

    def __init__(self, groups: list[dict], embeddings: Sequence[nn.Parameter], **settings: Any):
        super().__init__(groups, **settings)
        self.embeddings = {id(parameter) for parameter in embeddings}

    @torch.no_grad()
    def step(self, divisors: Tensor, skip: Tensor) -> None:  # type: ignore[override,unused-ignore]
        """The host waits for the device here, as bitsandbytes does after each parameter."""
        if skip:
            return
        for group, divisor in zip(self.param_groups, divisors, strict=True):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)
        super().step()

    def begin(self, parameter: nn.Parameter) -> None:
        places = ((g, n) for g, group in enumerate(self.param_groups) for n in range(len(group["params"])))
        group, number = next((g, n) for g, n in places if self.param_groups[g]["params"][n] is parameter)
        self.init_state(self.param_groups[group], parameter, group, number)

    # --- what bitsandbytes calls for each parameter ---

    def get_config(self, gindex: int, pindex: int, group: dict) -> dict[str, Any]:
        whole = id(group["params"][pindex]) in self.embeddings
        return super().get_config(gindex, pindex, group) | {"optim_bits": 32 if whole else 8}

    def init_state(self, group: dict, p: nn.Parameter, gindex: int, pindex: int) -> None:
        super().init_state(group, p, gindex, pindex)
        self.state[p]["step"] = torch.zeros(())  # a state is saved as tensors

    def update_step(self, group: dict, p: nn.Parameter, gindex: int, pindex: int) -> None:
        state = self.state[p]
        state["step"] = int(state["step"])
        super().update_step(group, p, gindex, pindex)
        state["step"] = torch.tensor(float(state["step"]))
