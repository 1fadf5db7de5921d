"""Which examples a step takes and how it is seeded: functions of seed and step alone, so a resumed run is the same."""

import numpy as np
import torch
from accelerate import Accelerator


def seed_of(*parts: int) -> int:
    """A well-mixed 63-bit seed from a few small integers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def examples_of_step(step: int, *, batch_size: int, total: int, seed: int) -> list[int]:
    """The `batch_size` examples of step `step` in an endless sequence of shuffled passes over `total` examples.

    A batch may hold the end of one pass and the beginning of the next: no example is left out, no batch is smaller.
    """
    first, last = step * batch_size, (step + 1) * batch_size
    passes = range(first // total, (last - 1) // total + 1)
    examples = torch.cat([shuffled(total, seed_of(seed, number)) for number in passes])
    start = first - passes.start * total
    return examples[start : start + batch_size].tolist()


def shuffled(total: int, seed: int) -> torch.Tensor:
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))


def process_share(examples: list[int], accelerator: Accelerator) -> list[int]:
    """The examples of this process; all processes together have each once."""
    return examples[accelerator.process_index :: accelerator.num_processes]
