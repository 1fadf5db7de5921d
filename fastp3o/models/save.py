"""Saves models in transformers' layout, and LoRA adapters in peft's, each complete or absent: the inverse of load."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastp3o.files import move_into_place, naming, temporary_sibling
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.trainable import whole_model
from fastp3o.processes import on_main_process

LARGEST_FILE = "5GB"  # of weights; this much is in memory at a time


def write_texts(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Has a folder written under a temporary name, and moves it to its place, where it may replace another."""
    unfinished = temporary_sibling(folder)
    try:
        unfinished.mkdir(parents=True)
        with naming(folder):
            write(unfinished)
        put_in_place(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def put_in_place(unfinished: Path, folder: Path) -> None:
    # safetensors makes files for their owner only; the others have the mode that the umask gives.
    for file in unfinished.rglob("*.safetensors"):
        file.chmod(next(file.parent.glob("*.json")).stat().st_mode)
    move_into_place(unfinished, folder)


def save_model(
    accelerator: Accelerator,
    model: PackedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Writes weights (safetensors), LoRA adapters merged, configuration and tokenizer in transformers' layout.

    dtype: of the written weights; None keeps the model's. write_more: writes what else belongs into the folder.
    """
    unfinished = temporary_sibling(folder)
    gathered = unfinished / "gathered"
    kept = KeptOnDisk(gathered, drop=not accelerator.is_main_process) if accelerator.num_processes > 1 else None

    def write() -> None:
        with naming(folder):
            if kept is not None:
                kept.require_written()
            try:
                whole.save_pretrained(unfinished, state_dict=weights, max_shard_size=LARGEST_FILE)
            except SafetensorError as error:
                raise OSError(f"cannot write {folder}: {error}") from error
            tokenizer.save_pretrained(unfinished)
            if write_more is not None:
                write_more(unfinished)
        shutil.rmtree(gathered, ignore_errors=True)
        put_in_place(unfinished, folder)

    try:
        whole, weights = whole_model(model.model, dtype, keep=kept)
        on_main_process(accelerator, write)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


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
