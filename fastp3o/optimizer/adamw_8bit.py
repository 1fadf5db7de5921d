"""AdamW with moments in 8 bits, by bitsandbytes (arXiv 2110.02861), for one process.

torchao's AdamW8bit, which takes shards, too, would need more of what is private: its moments are
tensors of a class whose codes and scales a state file would have to take apart, and neither
embeddings in fp32 nor a state before a first step can be asked for. It has torch compile a step for
each shape of a parameter, in every process, and takes the learning rate as a tensor alone.
bitsandbytes has its kernels built.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor, nn


class DividingAdamW8bit(AdamW8bit):  # type: ignore[misc,unused-ignore]
    """Steps as `DividingAdamW`. Moments of embeddings stay in fp32, as transformers' Trainer has
    them.
    """

    def __init__(self, embeddings: Sequence[nn.Parameter], groups: list[dict], **settings: Any):
        super().__init__(groups, **settings)
        # bitsandbytes has one manager a process, and other optimizers' settings in it.
        bits = {id(parameter): {"optim_bits": 32} for parameter in embeddings}
        self.mng = SimpleNamespace(pid2config=bits, index2config={}, module_weight_config_triple=[])

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
        places = [
            (g, n, p)
            for g, group in enumerate(self.param_groups)
            for n, p in enumerate(group["params"])
        ]
        group, number = next((g, n) for g, n, p in places if p is parameter)
        self.init_state(self.param_groups[group], parameter, group, number)
