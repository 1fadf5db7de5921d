"""Folders of models, each with one thing wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

CHAT = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    "{% if m.role in ('user', 'assistant') %}{{ m.role }}:{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LOOPS = "".join(["{% for a in range(99999) %}"] * 4 + ["{% endfor %}"] * 4)


def make_models(folder: Path, tiny_model: str) -> None:
    """whole, reward and chat are as they should be."""
    save_model(folder / "whole", tiny_model)
    save_model(folder / "larger", tiny_model, vocab_size=300)
    save_model(folder / "short", tiny_model, max_position_embeddings=16)
    reward_model = AutoModelForSequenceClassification.from_pretrained(folder / "whole", num_labels=1)
    for name, trained in (("reward", True), ("untrained", False)):
        if not trained:
            torch.nn.init.zeros_(reward_model.score.weight)
        reward_model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder / name)
    AutoModelForSequenceClassification.from_pretrained(folder / "whole", num_labels=2).save_pretrained(
        folder / "two_labels"
    )
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder / "two_labels")
    for name, (base, spoil) in SPOILT.items():
        shutil.copytree(folder / base, folder / name)
        spoil(folder / name)


def save_model(folder: Path, tiny_model: str, **settings: int) -> None:
    """A model with an untied head: a tied one cannot be missing."""
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(tiny_model, tie_word_embeddings=False, **settings)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return spoil


def without(part: str) -> Callable[[Path], None]:
    return weights(lambda named: {name: weight for name, weight in named.items() if part not in name})


def settings(file: str, **values: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return spoil


def with_last_row_nan(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    named["model.embed_tokens.weight"][-1] = torch.nan
    return named


def content(file: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_text(text) and None


def cut(file: str, length: int) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:length]) and None


def unlink(pattern: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return spoil


def add_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<new>", special=True)])
    tokenizer.save_pretrained(folder)


def exchange_letters(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def template(text: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = text
        tokenizer.save_pretrained(folder)

    return spoil


# name: the folder that it is a copy of, and what is done to it.
SPOILT: dict[str, tuple[str, Callable[[Path], None]]] = {
    "headless": ("whole", without("lm_head")),
    "layerless": ("whole", without("layers.1.")),
    "more": ("whole", weights(lambda named: named | {"model.extra.weight": torch.ones(2)})),
    "not_finite": ("whole", weights(lambda named: named | {"model.norm.weight": torch.full((32,), torch.nan)})),
    "not_finite_where_unused": ("whole", weights(with_last_row_nan)),
    "int8": ("whole", weights(lambda named: named | {"model.norm.weight": torch.ones(32, dtype=torch.int8)})),
    "rope": ("whole", settings("config.json", rope_parameters={"rope_type": "nosuch", "rope_theta": 1e4})),
    "list_config": ("whole", content("config.json", "[1]")),
    "list_tokenizer": ("whole", content("tokenizer_config.json", "[1]")),
    "empty_tokenizer": ("whole", content("tokenizer.json", "{}")),
    "adapter_of_nothing": ("whole", content("adapter_config.json", '{"peft_type": "LORA", "r": 2}')),
    "adapter_of_no_folder": (
        "whole",
        content("adapter_config.json", '{"peft_type": "LORA", "r": 2, "base_model_name_or_path": "runs/no/model"}'),
    ),
    "other_size": ("whole", settings("config.json", intermediate_size=96)),
    "cut": ("whole", cut("model.safetensors", 5000)),
    "empty_weights": ("whole", cut("model.safetensors", 0)),
    "no_weights": ("whole", unlink("*.safetensors")),
    "broken_config": ("whole", cut("config.json", 20)),
    "broken_generation": ("whole", cut("generation_config.json", 20)),
    "no_config": ("whole", unlink("config.json")),
    "no_tokenizer": ("whole", unlink("tokenizer*")),
    "broken_tokenizer": ("whole", cut("tokenizer.json", 100)),
    "larger_tokenizer": ("whole", add_token),
    "no_end": ("whole", settings("tokenizer_config.json", eos_token=None)),
    "permuted": ("whole", exchange_letters),
    "reward_layerless": ("reward", without("layers.1.")),
    "reward_short": ("reward", settings("config.json", max_position_embeddings=16)),
    "reward_cut": ("reward", cut("model.safetensors", 5000)),
    "reward_larger_tokenizer": ("reward", add_token),
    "chat": ("whole", template(CHAT)),
    "hangs": ("whole", template(LOOPS)),
}
