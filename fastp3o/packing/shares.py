"""The part of a step's examples that this process works on."""

from accelerate import Accelerator

from fastp3o.packing.bins import deal
from fastp3o.runtime.shares import Share

Examples = dict[str, list]  # columns of a data set


def process_share(examples: list[int], accelerator: Accelerator) -> list[int]:
    """The examples of this process: each process takes every n-th."""
    return examples[accelerator.process_index :: accelerator.num_processes]


def own_part(share: Share, examples: Examples) -> Examples:
    """The share's examples of a batch: about as many tokens as each other one gets."""
    columns = [column for name, column in examples.items() if name.endswith("_ids")]
    tokens = [0] * len(columns[0])
    for column in columns:
        for example, ids in enumerate(column):
            # A column has one text for each example, or a list of them.
            texts = ids if isinstance(ids[0], list) else [ids]
            tokens[example] += sum(map(len, texts))
    (parts,) = deal([tokens], share.count)
    part = parts[share.index]
    return {name: [column[example] for example in part] for name, column in examples.items()}
