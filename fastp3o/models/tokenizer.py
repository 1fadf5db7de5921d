"""Loads the tokenizer of a checkpoint, and compares the vocabularies of a policy and its reference."""

import copy
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from fastp3o.errors import UserError
from fastp3o.files import read_text
from fastp3o.models.checkpoint_files import at, errors_naming, has_file, has_tokenizer, load_config
from fastp3o.models.load_report import listed
from fastp3o.sources import InMemory, ModelSource


def load_tokenizer(
    name: ModelSource, *, trust_remote_code: bool = False, chat_template: str | None = None
) -> Tokenizer:
    """Loads the tokenizer of a model. chat_template: a file with a template that replaces the
    tokenizer's.

    Raises ValueError if there is no tokenizer, if the file cannot be read, if the tokenizer has no
    end-of-sequence token, without which responses could not end, and if it has tokens that the
    model lacks.
    """
    if isinstance(name, InMemory):
        tokenizer, config = copy.deepcopy(name.value.tokenizer), name.value.model.config
        return usable_tokenizer(name, tokenizer, config, chat_template)
    with errors_naming(name):
        # First: without the network the hub's client tries for half a minute to find each file.
        if not Path(str(name)).is_dir() and not (
            has_file(name, CONFIG_NAME) or has_file(name, ADAPTER_CONFIG_NAME)
        ):
            raise UserError(
                "it is neither a folder nor in the cache, and the hub cannot be reached (or is off)"
            )
        if not has_tokenizer(name):
            if has_file(name, f"adapter/{ADAPTER_CONFIG_NAME}") and not has_file(name, CONFIG_NAME):
                raise UserError(f"it holds only an adapter: use {name}/adapter")
            raise UserError("no tokenizer files found")
        tokenizer = AutoTokenizer.from_pretrained(
            str(name), trust_remote_code=trust_remote_code, **at(name)
        )
        config = load_config(name, trust_remote_code)
    return usable_tokenizer(name, tokenizer, config, chat_template)


def usable_tokenizer(
    name: ModelSource, tokenizer: Any, config: PretrainedConfig, chat_template: str | None
) -> Tokenizer:
    if chat_template:
        tokenizer.chat_template = read_text(chat_template, "chat_template")
    tokens = config.get_text_config().vocab_size
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {name} has no end-of-sequence token; set eos_token in its configuration"
        )
    beyond = sorted(
        (number, token) for token, number in tokenizer.get_vocab().items() if number >= tokens
    )
    if beyond:
        names = listed([repr(token) for _, token in beyond])
        raise UserError(
            f"the tokenizer of {name} has tokens that the model's {tokens} embeddings lack: {names}"
        )
    if tokenizer.pad_token_id is None:
        # Padding is masked wherever it is used, so any id serves.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def require_same_vocabulary(
    reference: ModelSource,
    policy: ModelSource,
    tokenizer: Tokenizer,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Raises ValueError if the reference has another vocabulary than the policy, so that its
    log-probs would be those of other tokens. Arguments are those of `vocabulary_difference`.
    """
    if difference := vocabulary_difference(
        reference, policy, tokenizer, trust_remote_code=trust_remote_code
    ):
        raise UserError(
            f"a reference needs the policy's vocabulary, and that of {reference} is not that of {policy}: {difference}"
        )


def vocabulary_difference(
    other: ModelSource,
    policy: ModelSource,
    tokenizer: Tokenizer,
    *,
    trust_remote_code: bool = False,
) -> str:
    """How a model's vocabulary differs from the policy's, in words; "" if it does not. tokenizer:
    the policy's. If the model has no tokenizer, only the sizes are compared.
    """
    with errors_naming(other):
        configs = (load_config(name, trust_remote_code) for name in (other, policy))
        there, here = (config.get_text_config().vocab_size for config in configs)
        ids = others = tokenizer.get_vocab()
        if has_tokenizer(other):
            others = AutoTokenizer.from_pretrained(
                str(other), trust_remote_code=trust_remote_code
            ).get_vocab()
    if there != here:
        return f"{there} tokens instead of {here}"
    if differing := sorted({token for token, _ in ids.items() ^ others.items()}):
        return f"{len(differing)} tokens have other ids or none, {listed(differing)}"
    return ""
