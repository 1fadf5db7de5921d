"""Reads LoRA adapters and merges them into their base model, with a trial that both compute the
same.
"""

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastp3o.errors import UserError
from fastp3o.models.checkpoint_files import at, dtypes_of_floats, errors_naming, weight_files
from fastp3o.models.load_report import listed
from fastp3o.models.merging import ADAPTER
from fastp3o.models.packable import PROMPTS, TOLERANCE, within_vocabulary
from fastp3o.sources import ModelSource

TRIED = 50  # trained tokens of a trial


def with_adapters(model: Any, name: ModelSource) -> Any:
    """The model with LoRA adapters merged into it. A model on the meta device gets the merged
    model's parameters.

    Raises ValueError for adapters of another kind, for missing adapters (peft only warns), for
    adapters that do not belong to this model (peft ignores them), and if merging changes what the
    model computes.
    """
    from peft import PeftConfig, PeftModel

    with errors_naming(name):
        (file,) = weight_files(name)  # peft would load other formats
        dtypes_of_floats(file)
        config: Any = PeftConfig.from_pretrained(str(name), **at(name))
        if config.peft_type != "LORA":
            raise UserError(
                f"it is an adapter of the kind {config.peft_type.value}, and only those of LoRA are merged"
            )
        config.task_type = None  # a reward model may begin with a language model's adapters
        config.inference_mode = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # what peft still calls of transformers
            warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys")
            # `part` does what it asks for.
            warnings.filterwarnings("ignore", message=r".*tie_word_embeddings")
            adapted: Any = PeftModel(
                model, config, ADAPTER, low_cpu_mem_usage=model.device.type == "meta"
            )
            inner: Any = adapted.base_model.model
            part(inner)
            if model.device.type == "meta":
                return adapted.unload().requires_grad_(True)
            read_adapters(adapted, name, file)
            ids = trial_ids(inner, config)
            expected = outputs(inner, ids)
            merged = adapted.merge_and_unload().requires_grad_(True)  # peft has frozen the base
            off = (outputs(merged, ids) - expected).abs().max() / expected.abs().max().clamp(min=1)
        if not off <= TOLERANCE[merged.dtype]:
            raise UserError(
                f"merging its adapters changes what it computes (by {off:.2g} of the largest)"
            )
        return merged


def read_adapters(adapted: Any, name: ModelSource, file: Path) -> None:
    """Reads the file of adapters. Raises ValueError if it lacks adapters of the model or has
    others.
    """
    try:
        result = adapted.load_adapter(str(name), ADAPTER, is_trainable=False, **at(name))
    except KeyError as error:  # of a module that was trained whole
        raise UserError(f"{file} lacks {error.args[0]}") from error
    lacking, others = (
        sorted(re.sub(rf"\.{ADAPTER}(?=\.|$)", "", key) for key in keys)
        for keys in (result.missing_keys, result.unexpected_keys)
    )
    if lacking:
        raise UserError(f"{file} lacks {listed(lacking)}")
    if others:
        base = adapted.peft_config[ADAPTER].base_model_name_or_path
        raise UserError(f"{file} has {listed(others)}, which the base {base} lacks")


def trial_ids(model: Any, config: Any) -> Tensor:
    """Token ids [1, n] for a trial, including those of trained tokens."""
    trained = config.trainable_token_indices or []
    few = [
        token
        for ids in (trained.values() if isinstance(trained, dict) else [trained])
        for token in ids[:TRIED]
    ]
    return torch.tensor([within_vocabulary(model, [*PROMPTS[0], *few])], device=model.device)


@torch.no_grad()
def outputs(model: Any, ids: Tensor) -> Tensor:
    """The logits; for a reward model, whose head may be new, the hidden states."""
    if hasattr(model, "score"):
        return model.base_model(ids, use_cache=False).last_hidden_state.float()
    return model(ids, use_cache=False).logits.float()


def part(model: Any) -> None:
    """Separates tied embeddings and head if one of them is adapted: an adapter of one must not
    change the other.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or (plain := base_of(head)).weight is not base_of(embeddings).weight:
        return
    # The same ones in both.
    tied_tokens = getattr(getattr(head, "token_adapter", None), "tied_adapter", None)
    if tied_tokens is None and (plain is not head or base_of(embeddings) is not embeddings):
        plain.weight = nn.Parameter(plain.weight.detach().clone())
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def base_of(module: Any) -> Any:
    """The module inside peft's layers and wrappers."""
    while (
        inside := getattr(module, "base_layer", getattr(module, "original_module", None))
    ) is not None:
        module = inside
    return module
