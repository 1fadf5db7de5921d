"""Chooses the examples of each step, shares them among the processes, and derives seeds.

Choices depend on seed, step and sizes only, so a resumed run makes the same.
"""

from collections.abc import Sequence

import numpy as np
import torch
from accelerate import Accelerator

Examples = dict[str, list]  # columns of a data set


def derived_seed(*parts: int) -> int:
    """A well-mixed 63-bit seed from a few small integers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def examples_of_step(step: int, *, batch_size: int, total: int, seed: int) -> list[int]:
    """The `batch_size` examples of step `step` in an endless sequence of shuffled passes over `total` examples.

    A batch may hold the end of one pass and the beginning of the next: no example is left out, no batch is smaller.
    """
    first, last = step * batch_size, (step + 1) * batch_size
    passes = range(first // total, (last - 1) // total + 1)
    examples = torch.cat([shuffled(total, derived_seed(seed, number)) for number in passes])
    start = first - passes.start * total
    return examples[start : start + batch_size].tolist()


def shuffled(total: int, seed: int) -> torch.Tensor:
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))


def process_share(examples: list[int], accelerator: Accelerator) -> list[int]:
    """The examples of this process: each process takes every n-th."""
    return examples[accelerator.process_index :: accelerator.num_processes]


def deal(steps: Sequence[Sequence[int]], processes: int) -> list[list[list[int]]]:
    """Deals out the work of some steps, given its sizes in tokens. Returns indices into them for each step and process.

    In every step each process gets about as many tokens. If there is too little work for all, those with the least
    tokens in earlier steps get it.
    """
    dealt = []
    before = [0] * processes
    for sizes in steps:
        parts: list[list[int]] = [[] for _ in range(processes)]
        tokens = [0] * processes
        for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            lightest = min(range(processes), key=lambda p: (tokens[p], before[p]))
            parts[lightest].append(index)
            tokens[lightest] += sizes[index]
        before = [sum(pair) for pair in zip(before, tokens, strict=True)]
        dealt.append([sorted(part) for part in parts])
    return dealt


def own_part(accelerator: Accelerator, examples: Examples) -> Examples:
    """This process's examples of a batch: about as many tokens as each other process gets."""
    texts = [column for name, column in examples.items() if name.endswith("_ids")]
    # A column has one text for each example, or a list of them.
    sizes = [
        sum(sum(map(len, ids)) if isinstance(ids[0], list) else len(ids) for ids in example)
        for example in zip(*texts, strict=True)
    ]
    (parts,) = deal([sizes], accelerator.num_processes)
    own = parts[accelerator.process_index]
    return {name: [column[example] for example in own] for name, column in examples.items()}
