"""The floating-point operations of matrix products within a block, on any device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Position of the left factor among the arguments; the right one follows.
LEFT = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.addmm_: 1, aten.baddbmm: 1, aten.baddbmm_: 1}


class Operations(TorchDispatchMode):
    """total: 2 for each multiplication with its addition."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        place = LEFT.get(func._overloadpacket)
        if place is not None:
            left, right = args[place : place + 2]
            self.total += 2 * left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))
