"""A model in memory, written to a folder from which a run loads its policy and its reference."""

import os
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fastp3o.config import StageConfig, TrainableConfig
from fastp3o.errors import UserError
from fastp3o.stages.setup import quiet_libraries


def saved_model(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, config: StageConfig, until_the_end: ExitStack
) -> str:
    """Writes a loaded model to a temporary folder, from which the run loads its policy and its reference."""
    if not isinstance(model, PreTrainedModel):
        merged = ", whose merge_and_unload() gives one" if hasattr(model, "merge_and_unload") else ""
        kind = type(model).__name__
        raise UserError(f"model must be a transformers model or what --model takes, got a {kind}{merged}")
    if any(weight.is_meta for weight in model.parameters()):
        raise UserError("model has no weights: they are on the meta device")
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(f"tokenizer must be a transformers tokenizer, got a {type(tokenizer).__name__}")
    if isinstance(config, TrainableConfig) and config.lora_rank and config.lora_save == "adapter":
        raise UserError("lora_save='adapter' needs the name of a model: no folder keeps a loaded one, the base")
    if tokenizer is None:
        if not model.name_or_path:
            raise UserError("a model that was not loaded from anywhere needs its tokenizer=")
        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    quiet_libraries()
    place = Path(until_the_end.enter_context(TemporaryDirectory(prefix="fastp3o-")))
    # The name stands in the cards of saved models.
    folder = str(place / (Path(model.name_or_path or "").name or type(model).__name__))
    # The other processes take the weights from the main one.
    if os.environ.get("RANK", "0") == "0":
        try:
            model.save_pretrained(folder)
        except ValueError as error:  # such as a generation configuration that contradicts itself
            raise UserError(f"model cannot be saved for the run: {' '.join(str(error).split())}") from error
    else:
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
