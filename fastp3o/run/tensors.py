"""The tensors of a state: a safetensors file from each process, which any number of processes
reads.

This is torch's distributed checkpoint, whose plan says which process writes which parts. Its own
writer of safetensors holds each file twice in memory, and its others write pickles. Its
`async_save` needs process groups of its own.
"""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fastp3o.files import write_file
from fastp3o.models.sharding import pin
from fastp3o.runtime.host_memory import free_host_memory

ELEMENTS_AT_ONCE = 2**20
# safetensors' names.
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}


def copied_to_write(path: Path, tensors: dict[str, Tensor]) -> Callable[[], dict[str, str]]:
    """Copies what this process writes: its shards of DTensors, and a share of plain tensors, which
    are equal on every process. Returns what writes the copies to `path`, beside the others' files,
    and gives the file's SHA-256 by its name; nothing without a part. Where host memory has no room
    for copies the file is already written.
    """
    writer = CopyingWriter(path)
    with plain_errors():
        checkpoint.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    return writer.write


def load_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fills tensors of the saved shapes in place, whatever their sharding."""
    with plain_errors():
        reader = HuggingFaceStorageReader(str(folder))
        checkpoint.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())


@contextmanager
def plain_errors() -> Iterator[None]:
    """Drops the warning that there is one process, and raises the error that torch wraps with its
    traceback.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        try:
            yield
        except checkpoint.CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


class CopyingWriter(HuggingFaceStorageWriter):
    """Copies what the plan gives this process, for `write`."""

    def __init__(self, path: Path):
        super().__init__(str(path.parent), save_distributed=True)
        self.file = path
        self.write: Callable[[], dict[str, str]] = dict

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        parts = {
            item.index.fqn: cast(Tensor, planner.resolve_data(item)).detach() for item in plan.items
        }
        offsets = {
            item.index.fqn: list(cast(Any, item.tensor_data).chunk.offsets) for item in plan.items
        }
        assert len(parts) == len(plan.items), "a process has one part of a tensor"
        if parts:
            written = parts
            if fits := sum(part.nbytes for part in parts.values()) < free_host_memory():
                written = {
                    name: part if part.is_cuda else part.clone() for name, part in parts.items()
                }
                # Torch keeps that memory for the next copies.
                pin(part for part in written.values() if part.is_cuda)
            self.write = cache(
                lambda: {self.file.name: write_file(self.file, blocks(written, offsets))}
            )
            if not fits:
                self.write()
        nothing_to_add: Future[list[WriteResult]] = Future()
        nothing_to_add.set_result([])
        return nothing_to_add


def blocks(parts: dict[str, Tensor], offsets: dict[str, list[int]]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file. offsets: where each part begins in its whole tensor, for
    torch's reader.
    """
    # Wide elements come first, so that all are aligned.
    names = sorted(parts, key=lambda name: (-parts[name].element_size(), name))
    sharding = json.dumps({name: {"saved_offsets": offset} for name, offset in offsets.items()})
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "DCP_SHARDING_INFO": sharding}}
    end = 0
    for name in names:
        begin, end = end, end + parts[name].nbytes
        dtype, shape = DTYPES[parts[name].dtype], list(parts[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for name in names:
        for block in parts[name].reshape(-1).split(ELEMENTS_AT_ONCE):
            yield block.cpu().view(torch.uint8).numpy().data
