"""Saves models in transformers' layout, each complete or absent.

output_dir/model/                 the finished model
output_dir/checkpoint-000050/     the model after step 50
output_dir/stopped-in-000061/     the model as it was when a value in step 61 was not finite
"""

import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from fastp3o.models.packed_model import PackedModel
from fastp3o.models.trainable import whole_model
from fastp3o.training.durable import move_into_place, naming, temporary_sibling
from fastp3o.training.processes import on_main_process

FINISHED_MODEL = "model"
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
    unfinished = temporary_sibling(folder)
    gathered = unfinished / "gathered"
    kept = KeptOnDisk(gathered, drop=not accelerator.is_main_process) if accelerator.num_processes > 1 else None

    def write() -> None:
        if kept is not None:
            with naming(folder):
                kept.require_written()
        with naming(folder):
            try:
                whole.save_pretrained(unfinished, state_dict=weights, max_shard_size=LARGEST_FILE)
            except SafetensorError as error:
                raise OSError(f"cannot write {folder}: {error}") from error
            tokenizer.save_pretrained(unfinished)
        # safetensors makes files for their owner only; the others have the mode that the umask gives.
        for file in unfinished.glob("*.safetensors"):
            file.chmod((unfinished / CONFIG_NAME).stat().st_mode)
        shutil.rmtree(gathered, ignore_errors=True)
        move_into_place(unfinished, folder)

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
