"""Saves models in transformers' layout, and LoRA adapters in peft's, each complete or absent.

output_dir/model/, adapter/           the finished model, LoRA adapters merged; the adapter alone
output_dir/checkpoint-000050/         the model after step 50, with the adapter in its own adapter/
output_dir/best/                      the model at the best evaluation, with --keep_best, likewise
output_dir/stopped-in-000061/model/   the model as it was when a value in step 61 was not finite; adapter/ beside it
"""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastp3o.models.adapters import adapter_config, adapter_weights, base_name, write_adapter
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.trainable import scores_responses, whole_model
from fastp3o.training.durable import move_into_place, naming, remove, temporary_sibling
from fastp3o.training.model_card import CARD, Training
from fastp3o.training.optimizer import Optimizer
from fastp3o.training.processes import on_main_process
from fastp3o.training.run_files import ADAPTER, FINISHED_MODEL

LARGEST_FILE = "5GB"  # of weights; this much is in memory at a time


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
