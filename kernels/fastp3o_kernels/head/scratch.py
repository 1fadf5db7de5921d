"""Memory for logits that stays between calls. On a CPU fresh pages cost a fault each; a GPU's
allocator keeps them.
"""

import torch
from torch import Tensor

# More is given back: a vocabulary of 65,536 takes this with 512 tokens in fp32.
MOST_BYTES = 2**27

SPARE: dict[torch.dtype, Tensor] = {}


def take(size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[size], not initialized: the spare one, or a fresh one while another call has it."""
    spare = SPARE.pop(dtype, None) if device.type == "cpu" else None
    if spare is None or len(spare) < size:
        with torch.inference_mode(False):  # or no call outside of that mode could write to it
            spare = torch.empty(size, dtype=dtype, device=device)
    return spare[:size]


def give_back(values: Tensor) -> None:
    """The memory of a tensor that was taken, or a view of it, which nobody uses any more."""
    base = values if values._base is None else values._base
    if base.device.type == "cpu" and base.nbytes <= MOST_BYTES:
        SPARE[base.dtype] = base
