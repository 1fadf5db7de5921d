"""Which examples a step has: shuffled passes over a data set.

They depend on seed, step and sizes only, so a resumed run draws the same ones.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def derived_seed(*parts: int) -> int:
    """A well-mixed 63-bit seed from a few small integers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def examples_of_step(step: int, *, batch_size: int, total: int, seed: int) -> list[int]:
    """The `batch_size` examples of step `step` in an endless sequence of shuffled passes over
    `total` examples. A batch may hold the end of one pass and the beginning of the next: no example
    is left out, no batch is smaller.
    """
    first, last = step * batch_size, (step + 1) * batch_size
    examples: list[int] = []
    for number in range(first // total, (last - 1) // total + 1):
        start = number * total
        order = order_of_pass(total, derived_seed(seed, number))
        examples += order[max(first - start, 0) : last - start].tolist()
    return examples


# Two passes of the prompts, since rollouts may be rounds ahead of the update, and two of further
# texts.
@lru_cache(maxsize=4)
def order_of_pass(total: int, seed: int) -> Tensor:
    """`shuffled` examples. The order is kept, 8 bytes an example, until those of other passes have
    come; never change it.
    """
    return shuffled(total, seed)


def shuffled(total: int, seed: int) -> Tensor:
    """[total] int64: the numbers below `total` in random order."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))
