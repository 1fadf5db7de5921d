"""Named tensors as safetensors: each process writes its part, and any number of processes reads them.

This is torch's distributed checkpoint with its storage of safetensors, which has no pickle; its plain storage does.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

# A file is put together in memory before it is written.
BYTES_PER_FILE = 2**30


def save_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Writes plain tensors, equal on every process, and DTensors, of which a process writes its shards."""
    with calm():
        writer = HuggingFaceStorageWriter(str(folder), file_numbers(tensors), save_distributed=True)
        checkpoint.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())


def load_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fills tensors of the saved shapes, in place and whatever their sharding."""
    with calm():
        reader = HuggingFaceStorageReader(str(folder))
        checkpoint.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())


def saved_names(folder: Path) -> set[str]:
    """The names of the tensors in a folder."""
    return set(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def file_numbers(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Which file, counted from 1, a tensor goes to; the same on every process."""
    numbers, total = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + total // BYTES_PER_FILE
        total += tensor.numel() * tensor.element_size()
    return numbers


@contextmanager
def calm() -> Iterator[None]:
    """Without the warning that there is one process, and with the error itself where torch wraps it with its trace."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except checkpoint.CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
