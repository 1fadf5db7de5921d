"""Tokenizers and models as the stages take them; those that are not whole, or do not fit together, are refused.

Of several processes the main one alone loads weights; the others have their models on the meta device, for `shard`.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from fastp3o.models.checkpoint import (
    base_of,
    errors_naming,
    from_checkpoint,
    has_tokenizer,
    listed,
    load_config,
    require_whole,
    with_adapters,
    without_weights,
)
from fastp3o.models.packable import require_packable, require_trainable
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import is_main_process

CPU = torch.device("cpu")


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Raises ValueError where there is none, where it has no end-of-sequence token, as responses could not end, and where
    it has tokens that the model does not.
    """
    with errors_naming(name):
        if not has_tokenizer(name):
            raise ValueError("it has no tokenizer's files")
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        tokens = load_config(name, trust_remote_code).get_text_config().vocab_size
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {name} has no end-of-sequence token; set eos_token in its configuration")
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= tokens)
    if beyond:
        raise ValueError(
            f"the tokenizer of {name} has tokens that the model's {tokens} embeddings lack: "
            f"{listed([repr(token) for _, token in beyond])}; is it another model's, or was the model not resized?"
        )
    if tokenizer.pad_token_id is None:
        # Padding is masked wherever it is used, so any id serves.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def require_same_vocabulary(
    reference: str, policy: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False
) -> None:
    """Raises ValueError where a reference gives log-probabilities of other tokens than those of the policy.

    tokenizer: the policy's. Of a reference without a tokenizer the number of tokens alone is compared.
    """
    expected = f"a reference needs the policy's vocabulary, and that of {reference} is not that of {policy}: "
    with errors_naming(reference):
        there, here = (
            load_config(name, trust_remote_code).get_text_config().vocab_size for name in (reference, policy)
        )
        others = None
        if has_tokenizer(reference):
            others = AutoTokenizer.from_pretrained(reference, trust_remote_code=trust_remote_code).get_vocab()
    if there != here:
        raise ValueError(f"{expected}{there} tokens instead of {here}")
    if others is not None and others != (own := tokenizer.get_vocab()):
        differing = sorted(token for token in own.keys() | others.keys() if own.get(token) != others.get(token))
        raise ValueError(f"{expected}{len(differing)} tokens have other ids or none, {listed(differing)}")


def load_policy(
    name: str,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    trains: bool = False,
) -> PackedModel:
    """A causal LM without dropout or noise of its routers: a policy's log-probabilities must not be random. LoRA
    adapters are merged into it.

    Raises ValueError where the checkpoint is not whole, where the model cannot be run on packed rows, and where the
    training mode of one that trains gives other log-probabilities all the same.
    """
    base = base_of(name)
    if not is_main_process():
        model = without_weights(AutoModelForCausalLM, base, dtype=dtype, trust_remote_code=trust_remote_code)
        with suppress(OSError):  # it has none of its own
            model.generation_config = GenerationConfig.from_pretrained(base)
        return PackedModel(model)
    model, loading = from_checkpoint(AutoModelForCausalLM, base, dtype=dtype, trust_remote_code=trust_remote_code)
    require_whole(base, loading)
    if base != name:
        model = with_adapters(model, name).merge_and_unload()
    policy = require_packable(PackedModel(model).to(device), name)
    return require_trainable(policy, name) if trains else policy


def load_reward_model(
    name: str,
    *,
    new_head: bool = False,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> PackedModel:
    """A sequence classifier with one output.

    new_head: also take a causal LM's checkpoint, to which a scalar head is added that starts at zero.

    Raises ValueError where the checkpoint is not whole or its head was not trained, where the model has no linear
    `score` head over hidden states, or more than one output, or cannot be run on packed rows.
    """
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "num_labels": 1}
    if not is_main_process():
        model = without_weights(AutoModelForSequenceClassification, name, **options)
        model.config.pad_token_id = model.config.pad_token_id or model.config.eos_token_id
        return PackedModel(model)
    model, loading = from_checkpoint(AutoModelForSequenceClassification, name, **options)
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__} ({name}) has no linear head `score`; use a decoder-only reward model")
    outputs = next((shape[0] for key, shape, _ in loading["mismatched_keys"] if key == "score.weight"), 1)
    if outputs != 1:
        raise ValueError(f"{name} has {outputs} outputs; a reward model has one")
    headless = "score.weight" in loading["missing_keys"]
    require_whole(name, loading, may_lack={"score.weight", "score.bias"}, may_exceed={"lm_head.weight"})
    if headless:
        nn.init.zeros_(head.weight)
    if not new_head and not head.weight.any():
        raise ValueError(
            f"{name} is no trained reward model: "
            + ("it is a language model without a head `score`" if headless else "its head `score` is zero")
            + "; train one from it with scripts/reward_model.py"
        )
    if model.config.pad_token_id is None:
        # transformers' classifier, which users load the saved model with, refuses batches otherwise.
        model.config.pad_token_id = model.config.eos_token_id
    return require_packable(PackedModel(model.to(device)), name)
