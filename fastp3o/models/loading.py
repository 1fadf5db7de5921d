"""Tokenizers and models from checkpoints, as the stages take them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import find_adapter_config_file

from fastp3o.models.packable import require_packable
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import is_main_process

CPU = torch.device("cpu")


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. Raises ValueError where it has no end-of-sequence token: responses could not end."""
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {name} has no end-of-sequence token; set eos_token in its configuration")
    if tokenizer.pad_token_id is None:
        # Padding is masked wherever it is used, so any id serves.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(
    name: str,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> PackedModel:
    """A causal LM without dropout: a policy's log-probabilities must not be random. LoRA adapters are merged into it.

    Of several processes the main one alone loads weights (`shard` gives the others theirs).

    Raises ValueError where the model cannot be run on packed rows.
    """
    base, adapter = name, find_adapter_config_file(name)
    if adapter is not None:
        from peft import PeftConfig, PeftModel

        base = PeftConfig.from_pretrained(name).base_model_name_or_path
    if not is_main_process():
        model = without_weights(AutoModelForCausalLM, base, dtype, trust_remote_code)
        with suppress(OSError):  # has none of its own
            model.generation_config = GenerationConfig.from_pretrained(base)
        return PackedModel(model)
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype, trust_remote_code=trust_remote_code, **dropout_off(base, trust_remote_code)
    )
    if adapter is not None:
        model = PeftModel.from_pretrained(model, name).merge_and_unload()
    return require_packable(PackedModel(model).to(device), name)


def load_reward_model(
    name: str,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> PackedModel:
    """A sequence classifier with one output. From a causal LM's checkpoint the scalar head starts at zero.

    Of several processes the main one alone loads weights (`shard` gives the others theirs).

    Raises ValueError where the model has no linear `score` head over hidden states, or more than one output, or cannot
    be run on packed rows.
    """
    if not is_main_process():
        model = without_weights(AutoModelForSequenceClassification, name, dtype, trust_remote_code, num_labels=1)
        model.config.pad_token_id = model.config.pad_token_id or model.config.eos_token_id
        return PackedModel(model)
    with load_report_held_back() as report:
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            name,
            num_labels=1,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **dropout_off(name, trust_remote_code),
        )
        missing = loading["missing_keys"]
        body = model.base_model_prefix + "."
        if missing and not any(key.startswith(body) for key in {*missing, *loading["unexpected_keys"]}):
            report.clear()  # a causal LM's checkpoint, whole but for the head
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__} ({name}) has no linear head `score`; use a decoder-only reward model")
    if head.out_features != 1:
        raise ValueError(f"{name} has {head.out_features} outputs; a reward model has one")
    if model.config.pad_token_id is None:
        # transformers' classifier, which users load the saved model with, refuses batches otherwise.
        model.config.pad_token_id = model.config.eos_token_id
    packable = require_packable(PackedModel(model.to(device)), name)
    if any(key.startswith("score.") for key in missing):
        nn.init.zeros_(head.weight)
    return packable


def without_weights(
    kind: type, name: str, dtype: torch.dtype, trust_remote_code: bool, **settings: int
) -> PreTrainedModel:
    """The same model on the meta device."""
    config = AutoConfig.from_pretrained(
        name, trust_remote_code=trust_remote_code, **settings, **dropout_off(name, trust_remote_code)
    )
    with torch.device("meta"):
        return cast(Any, kind).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


@contextmanager
def load_report_held_back() -> Iterator[list[logging.LogRecord]]:
    """Collects what transformers reports of missing and unexpected weights; what is left of it at the end is logged."""
    logger = logging.getLogger("transformers.modeling_utils")
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        held.append(record)
        return False

    logger.addFilter(hold)
    try:
        yield held
    finally:
        logger.removeFilter(hold)
        for record in held:
            logger.handle(record)


def dropout_off(name: str, trust_remote_code: bool) -> dict[str, float]:
    """Zero for every dropout probability that the model's configuration has."""
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    return {
        key: 0.0
        for key, value in config.to_dict().items()
        if isinstance(value, float) and key.endswith(("dropout", "pdrop", "dropout_prob", "layerdrop", "drop"))
    }
