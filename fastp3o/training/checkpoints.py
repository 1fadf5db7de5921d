"""Models as transformers loads them, each complete or absent.

output_dir/model/                 the finished model
output_dir/checkpoint-000050/     the model after step 50
output_dir/stopped-in-000061/     the model as it was when a value in step 61 was not finite
"""

import shutil
from pathlib import Path

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from fastp3o.models.packed_model import unwrap
from fastp3o.models.trainable import whole_model
from fastp3o.training.durable import beside, move_into_place
from fastp3o.training.processes import on_main_process

FINISHED_MODEL = "model"


def save_model(accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes weights (safetensors), LoRA adapters merged, configuration and tokenizer in transformers' layout."""

    def write() -> None:
        unfinished = beside(folder)
        try:
            whole, weights = whole_model(unwrap(model).model)
            whole.save_pretrained(unfinished, state_dict=weights)
            tokenizer.save_pretrained(unfinished)
            move_into_place(unfinished, folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    on_main_process(accelerator, write)
