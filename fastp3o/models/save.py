"""Saves models completely or not at all: whole models in transformers' layout, LoRA adapters in
peft's.

`load_policy` reads both, and `PeftModel.from_pretrained(base, folder)` an adapter.
"""

import copy
import os
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from fastp3o.models.merging import ADAPTER, has_adapter, whole_model, whole_weights
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import whole
from fastp3o.runtime.processes import on_main_process

LARGEST_FILE = "5GB"  # of weights
# Up to the number of a layer, or up to the module. What is fused or renamed in memory is so within
# one of these.
LAYER = re.compile(r".*?\.\d+(?=\.)|.*(?=\.)|.*")


def write_model(
    accelerator: Accelerator,
    model: PackedModel,
    tokenizer: Tokenizer,
    folder: Path,
    dtype: torch.dtype | None,
) -> None:
    """Writes weights (safetensors), LoRA adapters merged, configuration and tokenizer in
    transformers' layout. folder: not in its place yet. dtype: of the written weights; None keeps
    the model's.
    """
    whole, weights = whole_model(model.model, dtype)

    def write() -> None:
        try:
            whole.save_pretrained(folder, state_dict=weights, max_shard_size=LARGEST_FILE)
        except SafetensorError as error:
            raise OSError(f"cannot write the model to {folder.parent}: {error}") from error
        tokenizer.save_pretrained(folder)

    on_main_process(accelerator, write)


def hub_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """The weights that `write_model` would write, by the same names, a layer at a time, so that
    there is no second whole copy; parameters, also merged ones, in `dtype`. All processes iterate
    together.
    """
    for _, layer in groupby(
        whole_weights(model, dtype), key=lambda weight: LAYER.findall(weight[0][0])[0]
    ):
        weights = {
            names[0]: weight.to(dtype) if merged else weight for names, weight, merged in layer
        }
        yield revert_weight_conversion(model, weights)


def base_name(model: PreTrainedModel) -> str | None:
    """The model that the adapters belong to: a hub name or an absolute path. None without adapters,
    and if no checkpoint holds the base, for example when training began with adapters that were
    merged.
    """
    if not has_adapter(model) or not model.name_or_path:
        return None
    return (
        os.path.abspath(model.name_or_path)
        if Path(model.name_or_path).is_dir()
        else model.name_or_path
    )


def adapter_config(model: PreTrainedModel) -> Any:
    """peft's configuration of a model's adapter, for its file. A reward model's head is saved with
    the adapter.
    """
    config: Any = copy.copy(model.peft_config[ADAPTER])
    config.base_model_name_or_path, config.inference_mode = base_name(model), True
    config.revision = getattr(model, "revision_loaded", None)  # a model that others loaded has none
    for targets in ("target_modules", "target_parameters"):
        if isinstance(names := getattr(config, targets, None), set):
            # A set has another order in every process, and a resumed run writes the same bytes.
            setattr(config, targets, sorted(names))
    if hasattr(model, "score"):
        config.modules_to_save = ["score"]
    return config


def adapter_weights(trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an adapter, and of a reward model's head, by peft's names. trained: the
    trained weights in fp32, by their names in a PackedModel. Shards are gathered on all processes.
    """
    return {
        f"base_model.{name}".replace(f".{ADAPTER}", ""): whole(weight.detach())
        .to("cpu", torch.float32)
        .contiguous()
        for name, weight in trained.items()
        if ".lora_" in name or name.startswith("model.score.")
    }


def write_adapter(folder: Path, config: Any, weights: dict[str, Tensor]) -> None:
    """Raises OSError if the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    try:
        save_file(weights, folder / ADAPTER_SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {folder}: {error}") from error
