"""Tokenizers, chat templates and ends as families of models publish them, in small: a letter is a
token, the special tokens and what the templates do with them are like theirs.

The published tokenizers themselves take part where the environment variable FASTP3O_TOKENIZERS
names a folder of them (`scripts/test_real.sh` makes one): a folder each, with the name of its
family.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

REAL_TOKENIZERS = os.environ.get("FASTP3O_TOKENIZERS")

# Earlier replies lose their thinking, the last one keeps it; `enable_thinking` false begins a reply
# after an empty one.
QWEN3 = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages if m.role == 'user' %}{% set last.user = messages.index(m) %}{% endfor %}
{%- for m in messages %}
    {%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}
    {%- set content = m.content %}
    {%- if m.role == 'assistant' and not reasoning and '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > last.user and (loop.last or reasoning) %}
        {{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- '<tool_response>\\n' + content + '\\n</tool_response>' if m.role == 'tool' else content }}
    {%- for call in m.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' + ((call.function or call) | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
CHATML = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Trims contents, calls the assistant "model", wants turns to alternate, and writes the system's
# before the first one.
GEMMA = """\
{{- bos_token }}
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if system else messages) %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
    {{- (system if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
# Writes the date, trims contents, and calls the role of tools "ipython".
LLAMA3 = """\
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' }}
{{- (date_string if date_string is defined else strftime_now('%d %b %Y')) + '\\n\\n' }}
{%- if tools %}{{ tools | tojson }}{% endif %}{{ '<|eot_id|>' }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
    {%- if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
LLAMA2 = """\
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}{% endif %}
    {%- if m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}
{%- endfor %}"""
# The end of the whole text, which is never sampled after a turn, follows where no reply is asked
# for.
PHI3 = """\
{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""
# Thinking has a channel; a reply ends with <|return|>, and with <|end|> once others follow it.
GPT_OSS = """\
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') }}
{{- '\\nReasoning: ' + (reasoning_effort if reasoning_effort is defined else 'medium') + '<|end|>' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if m.thinking and loop.last and not add_generation_prompt %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """special: the other special tokens, beside eos, pad and bos. ends: those that its
    generation_config stops at, in its order. dummy_prefix: whether the tokenizer puts a space
    before every text, as SentencePiece does.
    """

    name: str
    template: str | None
    eos: str
    pad: str | None
    bos: str | None
    special: tuple[str, ...]
    ends: tuple[str, ...]
    dummy_prefix: bool = False
    make: Callable[[], PreTrainedTokenizerBase] | None = field(default=None, repr=False)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.make() if self.make else small_tokenizer(self)

    def end_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """As generation_config has them."""
        vocabulary = tokenizer.get_vocab()  # earlier versions of a published tokenizer lack some
        return [vocabulary[token] for token in self.ends if token in vocabulary]

    def settings(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The special tokens of its model's config: one number for eos, or a list where there are
        several ends.
        """
        ends = self.end_ids(tokenizer)
        return {
            "vocab_size": len(tokenizer),
            "eos_token_id": ends if len(ends) > 1 else ends[0],
            "pad_token_id": tokenizer.pad_token_id if self.pad else None,
            "bos_token_id": tokenizer.bos_token_id,
        }

    def __str__(self) -> str:
        return self.name


def small_tokenizer(family: Family) -> PreTrainedTokenizerBase:
    if family.dummy_prefix:
        pieces = [
            "<unk>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            "▁",
            *map(chr, range(33, 127)),
        ]
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        own = Tokenizer(
            models.BPE(
                vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True
            )
        )
        own.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        parts = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        own.decoder = decoders.Sequence(parts)
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        own = Tokenizer(
            models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[])
        )
        own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        own.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own,
        eos_token=family.eos,
        pad_token=family.pad,
        bos_token=family.bos,
        unk_token="<unk>" if family.dummy_prefix else None,
    )
    known = {family.eos, family.pad, family.bos}
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [one for one in family.special if one not in known]}
    )
    tokenizer.chat_template = family.template
    return tokenizer


QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3_TOKENS = (
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
)
GPT_OSS_TOKENS = (
    "<|return|>",
    "<|endoftext|>",
    "<|call|>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|end|>",
)
GPT_OSS_ENDS = ("<|return|>", "<|endoftext|>", "<|call|>")
FAMILIES = [
    Family(
        "qwen3",
        QWEN3,
        "<|im_end|>",
        "<|endoftext|>",
        None,
        QWEN_TOKENS,
        ("<|im_end|>", "<|endoftext|>"),
    ),
    # The base: its template ends a turn with a token at which its generation_config does not stop.
    Family(
        "qwen_base", CHATML, "<|endoftext|>", "<|endoftext|>", None, QWEN_TOKENS, ("<|endoftext|>",)
    ),
    # Tuned by others, who set the tokenizer's end of sequence and left generation_config.
    Family(
        "qwen_tuned", CHATML, "<|im_end|>", "<|endoftext|>", None, QWEN_TOKENS, ("<|endoftext|>",)
    ),
    Family(
        "gemma3",
        GEMMA,
        "<eos>",
        "<pad>",
        "<bos>",
        ("<start_of_turn>", "<end_of_turn>"),
        ("<eos>", "<end_of_turn>"),
    ),
    Family(
        "llama3_1",
        LLAMA3,
        "<|eot_id|>",
        None,
        "<|begin_of_text|>",
        LLAMA3_TOKENS,
        LLAMA3_TOKENS[:3],
    ),
    # The base: without a template.
    Family(
        "llama3_base",
        None,
        "<|end_of_text|>",
        None,
        "<|begin_of_text|>",
        LLAMA3_TOKENS,
        LLAMA3_TOKENS[:1],
    ),
    Family("llama2", LLAMA2, "</s>", None, "<s>", (), ("</s>",), dummy_prefix=True),
    Family(
        "phi3",
        PHI3,
        "<|endoftext|>",
        "<|endoftext|>",
        "<s>",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ("<|endoftext|>", "<|assistant|>", "<|end|>"),
        dummy_prefix=True,
    ),
    Family(
        "gptoss",
        GPT_OSS,
        "<|return|>",
        "<|endoftext|>",
        "<|startoftext|>",
        GPT_OSS_TOKENS,
        GPT_OSS_ENDS,
    ),
]


def published(family: Family, folder: Path) -> Family:
    """The family with its published tokenizer, and the published template where the tokenizer's
    file has it.
    """
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return Family(
        name=f"{family.name}-published",
        template=config.get("chat_template", family.template),
        eos=family.eos,
        pad=family.pad,
        bos=family.bos,
        special=family.special,
        ends=family.ends,
        dummy_prefix=family.dummy_prefix,
        make=lambda: published_tokenizer(family, folder),
    )


def published_tokenizer(family: Family, folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = family.eos  # copies of Gemma's have the end of turn there
    tokenizer.chat_template = tokenizer.chat_template or family.template
    return tokenizer


if REAL_TOKENIZERS:
    by_name = {family.name: family for family in FAMILIES}
    folders = sorted(folder for folder in Path(REAL_TOKENIZERS).iterdir() if folder.name in by_name)
    FAMILIES += [published(by_name[folder.name], folder) for folder in folders]

WITH_TEMPLATE = [family for family in FAMILIES if family.name != "llama3_base"]

# For tests that hold for every family, and for those that have a chat template.
every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)
every_chat_family = pytest.mark.parametrize("family", WITH_TEMPLATE, ids=str)


def save_family(
    family: Family, folder: Path, *, scores: bool = False, seed: int = 0, **settings: Any
) -> tuple[str, PreTrainedTokenizerBase]:
    """A random Llama of the family's vocabulary, a reward model if it `scores`, with
    generation_config and tokenizer. settings: other values of its config.
    """
    tokenizer = family.tokenizer()
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
    }
    config = LlamaConfig(
        **(sizes | family.settings(tokenizer) | ({"num_labels": 1} if scores else {}) | settings)
    )
    generator = torch.Generator().manual_seed(seed)
    model = (LlamaForSequenceClassification if scores else LlamaForCausalLM)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.15 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    if not scores:
        model.generation_config = GenerationConfig(
            eos_token_id=family.end_ids(tokenizer),
            pad_token_id=config.pad_token_id,
            bos_token_id=config.bos_token_id,
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), tokenizer
