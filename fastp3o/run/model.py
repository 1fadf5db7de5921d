"""Saves models in transformers' layout, and LoRA adapters in peft's, each complete or absent.

output_dir/model/, adapter/           the finished model, LoRA adapters merged; the adapter alone
output_dir/checkpoint-000050/         the model after step 50, with the adapter in its own adapter/
output_dir/best/                      the model at the best evaluation, with --keep_best, likewise
output_dir/stopped-in-000061/model/   the model as it was when a value in step 61 was not finite; adapter/ beside it
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

from fastp3o.files import remove
from fastp3o.models.adapters import adapter_config, adapter_weights, base_name, write_adapter
from fastp3o.models.save import save_model, write_folder, write_texts
from fastp3o.models.trainable import scores_responses
from fastp3o.optimizer import Optimizer
from fastp3o.processes import on_main_process
from fastp3o.run.card import CARD, Training
from fastp3o.run.names import ADAPTER, FINISHED_MODEL


def save_trained(
    optimizer: Optimizer,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    training: Training,
    files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Saves the model that trains, its LoRA adapter, or both, as `--lora_save` says, each with a card. What an earlier
    save with another choice has left is removed.

    folder: of the model. The adapter goes into `adapter/`, beside `model/` and inside any other folder. files: further
    texts in the folder, by the names of their files.
    """
    accelerator, model, config = optimizer.accelerator, optimizer.model, training.config
    parts = config.lora_save
    card = partial(training.card, classifies=scores_responses(model))
    beside = folder.name == FINISHED_MODEL
    adapter = folder.with_name(ADAPTER) if beside else folder / ADAPTER
    nowhere = parts == "merged" or base_name(model.model) is None
    write = None if nowhere else adapter_writer(optimizer, tokenizer, training)
    if write is not None and (beside or parts == "adapter"):
        # With the folder around it, if that is new, it is complete or absent.
        place, inside = (adapter, ".") if beside else (folder, ADAPTER)

        def write_alone(unfinished: Path) -> None:
            write(unfinished / inside)
            write_texts(unfinished, files)

        on_main_process(accelerator, lambda: write_folder(place, write_alone))
    if write is None or parts != "adapter":

        def write_more(unfinished: Path) -> None:
            if write is not None and not beside:
                write(unfinished / ADAPTER)
            write_texts(unfinished, {CARD: card(adapter=False), **files})

        save_model(accelerator, model, tokenizer, folder, optimizer.precision.weights, write_more)
    if beside:
        stale = adapter if write is None else folder if parts == "adapter" else None
        on_main_process(accelerator, lambda: remove(stale) if stale is not None and stale.exists() else None)


def adapter_writer(
    optimizer: Optimizer, tokenizer: PreTrainedTokenizerBase, training: Training
) -> Callable[[Path], None]:
    """Gathers an adapter, on all processes, and returns what writes it to a folder, with the tokenizer and its card."""
    model = optimizer.model.model
    weights = adapter_weights(optimizer.parameters, model.active_adapters()[0])

    def write(folder: Path) -> None:
        write_adapter(folder, adapter_config(model), weights)
        tokenizer.save_pretrained(folder)
        (folder / CARD).write_text(training.card(classifies=scores_responses(optimizer.model), adapter=True))

    return write
