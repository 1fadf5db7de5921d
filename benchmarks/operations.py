"""The floating-point operations of matrix products within a block, on any device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# PyTorch's own formulas lack the products in place.
FORMULAS = flop_registry | {torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm]}


class Operations(TorchDispatchMode):
    """total: 2 for each multiplication with its addition."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func._overloadpacket in FORMULAS:
            self.total += FORMULAS[func._overloadpacket](*args, **(kwargs or {}), out_val=results)
        return results
