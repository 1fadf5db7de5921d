"""Saves models in transformers' layout, LoRA adapters merged, complete or absent: the inverse of load."""

import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastp3o.models.packed_model import PackedModel
from fastp3o.models.trainable import whole_model
from fastp3o.processes import on_main_process, whole_folder

LARGEST_FILE = "5GB"  # of weights; this much is in memory at a time


def save_model(
    accelerator: Accelerator,
    model: PackedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes weights (safetensors), LoRA adapters merged, configuration and tokenizer in transformers' layout.

    dtype: of the written weights; None keeps the model's.
    """
    with whole_folder(accelerator, folder) as unfinished:
        write_model(accelerator, model, tokenizer, unfinished, dtype)


def write_model(
    accelerator: Accelerator,
    model: PackedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype | None,
) -> None:
    """`save_model` into a folder that is not in its place yet."""
    gathered = folder / "gathered"
    kept = KeptOnDisk(gathered, drop=not accelerator.is_main_process) if accelerator.num_processes > 1 else None
    whole, weights = whole_model(model.model, dtype, keep=kept)

    def write() -> None:
        if kept is not None:
            kept.require_written()
        try:
            whole.save_pretrained(folder, state_dict=weights, max_shard_size=LARGEST_FILE)
        except SafetensorError as error:
            raise OSError(f"cannot write the model to {folder.parent}: {error}") from error
        tokenizer.save_pretrained(folder)
        shutil.rmtree(gathered, ignore_errors=True)

    on_main_process(accelerator, write)


class KeptOnDisk:
    """Keeps weights in files, since together they may not fit into memory. With `drop`, keeps nothing."""

    def __init__(self, folder: Path, *, drop: bool):
        self.folder, self.drop, self.count = folder, drop, 0
        self.error: OSError | None = None

    def __call__(self, weight: Tensor) -> Tensor:
        if not self.drop:
            try:
                return self.written(weight)
            except OSError as error:
                # The other processes still gather weights with this one.
                self.error, self.drop = error, True
        return weight.new_empty(0)

    def written(self, weight: Tensor) -> Tensor:
        """Writes a weight to its own file and maps that. On a full disk writing to a mapped page would kill."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.count += 1
        file = self.folder / str(self.count)
        file.write_bytes(weight.cpu().reshape(-1).view(torch.uint8).numpy().data)
        return torch.from_file(str(file), shared=False, size=weight.numel(), dtype=weight.dtype).view_as(weight)

    def require_written(self) -> None:
        """Raises the OSError if a weight could not be written."""
        if self.error is not None:
            raise self.error
