"""The tensors of a state: a safetensors file from each process, which any number of processes reads.

This is torch's distributed checkpoint, whose plan says which process writes which parts. Its reader of safetensors
serves; its writer holds each file twice in memory, and its others write pickles.
"""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fastp3o.files import write_file

ELEMENTS_AT_ONCE = 2**20
# safetensors' names.
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.uint8: "U8"}


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Writes plain tensors, which are equal on every process, and DTensors, of which each process writes its shards.

    path: of this process's file, beside those of the others. Returns the file's SHA-256 by its name; nothing if this
    process has no part.
    """
    writer = Writer(path)
    with plain_errors():
        checkpoint.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    return writer.checksums


def load_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fills tensors of the saved shapes in place, whatever their sharding."""
    with plain_errors():
        reader = HuggingFaceStorageReader(str(folder))
        checkpoint.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())


@contextmanager
def plain_errors() -> Iterator[None]:
    """Drops the warning that there is one process, and raises the error that torch wraps with its traceback."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except checkpoint.CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


class Writer(checkpoint.StorageWriter):
    """Writes the parts of the plan that are this process's, block after block, so that no copy of a file is made."""

    def __init__(self, path: Path):
        self.path = path
        self.checksums: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        offsets, parts = {}, {}
        for item in plan.items:
            offsets[item.index.fqn] = {"saved_offsets": list(cast(Any, item.tensor_data).chunk.offsets)}
            parts[item.index.fqn] = cast(Tensor, planner.resolve_data(item)).detach()
        assert len(parts) == len(plan.items), "a process has one part of a tensor"
        if parts:
            self.checksums[self.path.name] = write_file(self.path, blocks(parts, offsets))
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(item.index, parts[item.index.fqn].nbytes, None) for item in plan.items])
        return written

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The files say what is where."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def blocks(parts: dict[str, Tensor], offsets: dict[str, Any]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file. offsets: where each part begins in its whole tensor, for torch's reader."""
    # Wide elements come first, so that all are aligned.
    names = sorted(parts, key=lambda name: (-parts[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}}
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
