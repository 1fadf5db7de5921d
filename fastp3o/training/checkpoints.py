"""Models as transformers loads them, each complete or absent.

output_dir/model/                 the finished model
output_dir/checkpoint-000050/     the model after step 50
output_dir/stopped-in-000061/     the model as it was when a value in step 61 was not finite
"""

import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastp3o.models.packed_model import PackedModel
from fastp3o.models.trainable import as_it_is, whole_model
from fastp3o.training.durable import beside, move_into_place
from fastp3o.training.processes import on_main_process

FINISHED_MODEL = "model"
# Of a model's weights: as much of them is in memory at a time.
LARGEST_FILE = "5GB"


def save_model(
    accelerator: Accelerator,
    model: PackedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes weights (safetensors), LoRA adapters merged, configuration and tokenizer in transformers' layout.

    dtype: of the weights written; None for that of the model's.
    """
    unfinished = beside(folder)
    gathered = unfinished / "gathered"
    several = accelerator.num_processes > 1
    keep = KeptOnDisk(gathered, drop=not accelerator.is_main_process) if several else as_it_is

    def write() -> None:
        whole.save_pretrained(unfinished, state_dict=weights, max_shard_size=LARGEST_FILE)
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(gathered, ignore_errors=True)
        move_into_place(unfinished, folder)

    try:
        whole, weights = whole_model(model.model, dtype, keep=keep)
        on_main_process(accelerator, write)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


class KeptOnDisk:
    """Keeps weights in files of a folder, since together they need not fit the memory; or drops them."""

    def __init__(self, folder: Path, *, drop: bool):
        self.folder, self.drop, self.count = folder, drop, 0

    def __call__(self, weight: Tensor) -> Tensor:
        if self.drop:
            return weight.new_empty(0)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.count += 1
        file = str(self.folder / str(self.count))
        return torch.from_file(file, shared=True, size=weight.numel(), dtype=weight.dtype).view_as(weight).copy_(weight)
