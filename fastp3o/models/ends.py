"""How responses end, in a checkpoint's settings: read before its weights are loaded, and written
before they train.
"""

from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from fastp3o.data.encoding import ResponseEnds, response_ends, special_tokens
from fastp3o.models.checkpoint_files import (
    at,
    base_model_name,
    errors_naming,
    has_file,
    load_config,
)
from fastp3o.sources import InMemory, ModelSource


def checkpoint_ends(
    name: ModelSource, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False
) -> ResponseEnds:
    """The tokens that end a checkpoint's responses: those of its generation_config, or of its
    configuration if it has none. LoRA adapters use those of their base. Raises ValueError if these
    files cannot be read.
    """
    if isinstance(name, InMemory) and name.value.model.can_generate():
        return response_ends(tokenizer, name.value.model.generation_config)
    base = base_model_name(name)
    with errors_naming(base):
        if not isinstance(base, InMemory) and has_file(base, GENERATION_CONFIG_NAME):
            return response_ends(tokenizer, GenerationConfig.from_pretrained(str(base), **at(base)))
        return response_ends(tokenizer, load_config(base, trust_remote_code).get_text_config())


def write_ends(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ends: ResponseEnds
) -> None:
    """Writes the ends at which a run stops into the settings that are saved with its model: into
    generation_config, or into the configuration of a reward model, which has no other place for
    them.

    transformers' classifiers read the score at the last token that is not padding. So a reward
    model's texts are padded with a token that is no end, and its tokenizer gets the same. ends:
    those of the checkpoint are among them.
    """
    if model.can_generate():
        write_eos(model.generation_config, ends)
        return
    padding = padding_token(model, tokenizer, ends)
    if padding is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)
    for config in (model.config, model.config.get_text_config()):
        write_eos(config, ends)
        config.pad_token_id = padding


def write_eos(config: Any, ends: ResponseEnds) -> None:
    """Sets eos_token_id, unless the present value means the same: a number, or a list in another
    order.
    """
    eos = getattr(config, "eos_token_id", None)
    if {*ends.ids} != {*(eos if isinstance(eos, list | tuple) else [eos])}:
        config.eos_token_id = list(ends.ids) if len(ends.ids) > 1 else ends.ids[0]


def padding_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ends: ResponseEnds
) -> int | None:
    """A token for padding: the tokenizer's, or the configuration's, if it is no end. Otherwise a
    special one that is none: the one for unknown characters, or the last one that the chat template
    does not name (reserved ones stand there), or any. Where all are ends, one that closes no
    written response; and None where one token is all of this, as GPT-2's: transformers then scores
    texts one by one, and refuses batches.
    """
    special, template = special_tokens(tokenizer), str(tokenizer.chat_template)
    last_first = sorted(special.keys() - {tokenizer.bos_token_id}, reverse=True)
    unnamed = [number for number in last_first if special[number] not in template]
    own = [
        tokenizer.pad_token_id,
        model.config.get_text_config().pad_token_id,
        tokenizer.unk_token_id,
    ]
    candidates = [
        number
        for number in (*own, *unnamed, *last_first, tokenizer.bos_token_id)
        if number in special
    ]
    no_end = [number for number in candidates if number not in ends.ids]
    closing_none = [number for number in candidates if number not in (ends.text, ends.chat)]
    return next(iter([*no_end, *closing_none]), None)
