"""Saves models in transformers' layout, and LoRA adapters in peft's, each complete or absent."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from transformers import PreTrainedTokenizerBase

from fastp3o.files import remove
from fastp3o.models.save import (
    adapter_config,
    adapter_weights,
    base_name,
    write_adapter,
    write_model,
)
from fastp3o.models.trainable import scores_responses
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.run.card import CARD, Training
from fastp3o.run.names import ADAPTER, FINISHED_MODEL
from fastp3o.runtime.processes import on_main_process, whole_folder


def save_trained(
    optimizer: Optimizer,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    training: Training,
    lora_save: Literal["both", "merged", "adapter"],
    files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Saves the model that trains, its LoRA adapter, or both, as `lora_save` says, each with a
    card. What an earlier save with another choice has left is removed. folder: of the model. The
    adapter goes into `adapter/`, beside `model/` and inside any other folder. files: further texts
    in the folder, by the names of their files.
    """
    accelerator, model = optimizer.accelerator, optimizer.model
    has_adapter = base_name(model.model) is not None
    saves_adapter = has_adapter and lora_save != "merged"
    saves_model = not saves_adapter or lora_save != "adapter"
    beside = folder.name == FINISHED_MODEL
    adapter = folder.with_name(ADAPTER)
    # Gathered from all processes, so before one of them writes alone.
    weights = adapter_weights(optimizer.parameters) if saves_adapter else {}

    def write_alone(place: Path) -> None:
        write_adapter(place, adapter_config(model.model), weights)
        tokenizer.save_pretrained(place)
        (place / CARD).write_text(training.card(classifies=scores_responses(model), adapter=True))

    def write_texts(place: Path) -> None:
        texts = dict(files)
        if saves_model:
            card = training.card(classifies=scores_responses(model), adapter=False)
            texts = {CARD: card, **texts}
        for name, text in texts.items():
            (place / name).write_text(text)

    def remove_stale() -> None:
        for place, is_saved in ((folder, saves_model), (adapter, saves_adapter)):
            if not is_saved and place.exists():
                remove(place)

    if saves_adapter and beside:
        with whole_folder(accelerator, adapter) as place:
            on_main_process(accelerator, lambda: write_alone(place))
    if saves_model or not beside:
        with whole_folder(accelerator, folder) as place:
            if saves_model:
                write_model(accelerator, model, tokenizer, place, optimizer.precision.weights)
            if saves_adapter and not beside:
                on_main_process(accelerator, lambda: write_alone(place / ADAPTER))
            on_main_process(accelerator, lambda: write_texts(place))
    if beside:
        on_main_process(accelerator, remove_stale)
