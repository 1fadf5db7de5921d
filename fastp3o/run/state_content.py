"""The content of a state: named tensors as safetensors, and the random generators of a process as JSON.

Each process writes its part of the tensors, and any number of processes reads them. This is torch's distributed
checkpoint with its safetensors storage, which has no pickle; its default storage does. The run's own random choices
depend on seed and step only, but a reward function may draw from the global generators.
"""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

BYTES_PER_FILE = 2**30  # a file is put together in memory before it is written


def save_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Writes plain tensors, which are equal on every process, and DTensors, of which each process writes its shards."""
    numbers, total = {}, 0  # the file of each tensor, from 1; the same on every process
    for name, tensor in tensors.items():
        numbers[name] = 1 + total // BYTES_PER_FILE
        total += tensor.numel() * tensor.element_size()
    with plain_errors():
        writer = HuggingFaceStorageWriter(str(folder), numbers, save_distributed=True)
        checkpoint.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())


def load_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fills tensors of the saved shapes in place, whatever their sharding."""
    with plain_errors():
        reader = HuggingFaceStorageReader(str(folder))
        checkpoint.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())


def saved_names(folder: Path) -> set[str]:
    """The names of the tensors in a folder."""
    return set(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Drops the warning that there is one process, and raises the error that torch wraps with its traceback."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except checkpoint.CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


def generator_states() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": as_text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        states["cuda"] = as_text(torch.cuda.get_rng_state())
    return states


def restore_generators(states: dict[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(as_bytes(states["torch"]))
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(as_bytes(states["cuda"]))


def as_text(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def as_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
