"""Data of a language for all three stages, and an untrained model with only its words."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.frontier.tasks.language import MAX_TOKENS, VOCABULARY, Language
from fastp3o.training import sft
from fastp3o.training.sft import SFTConfig

DEMONSTRATIONS = 16_000
TRAIN_PAIRS, EVAL_PAIRS = 22_000, 1_000
TRAIN_PROMPTS, EVAL_PROMPTS = 4096, 128

# Labels follow P(a over b) = σ(PREFERENCE_SCALE (u(a) − u(b))), then a twentieth is flipped. The
# true utility agrees with 77% of them.
PREFERENCE_SCALE, FLIPPED = 1.7, 0.05

END, PAD = "<end>", "<pad>"

# Fields of SFTConfig and RewardModelConfig with which one thread learns both in four minutes.
COMMON: dict[str, Any] = {
    "max_prompt_tokens": 16,
    "max_response_tokens": MAX_TOKENS,
    "tokens_per_row": 2048,
    "batch_size": 64,
    "lr_schedule": "cosine",
    "warmup_steps": 20,
    "report_to": "none",
    "precision": "fp32",
}
SFT = COMMON | {"epochs": 3, "learning_rate": 6e-3}
REWARD_MODEL = COMMON | {"epochs": 2, "learning_rate": 2e-3}


def make_data(folder: Path, seed: int) -> None:
    """Writes the data of the language and, in init/, tokenizer and model; no prompt occurs twice in
    all files.
    """
    language, rng = Language(seed), np.random.default_rng([seed, 1])
    total = DEMONSTRATIONS + TRAIN_PAIRS + EVAL_PAIRS + TRAIN_PROMPTS + EVAL_PROMPTS
    prompts = iter(language.prompts(total, rng))
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in {
        "sft": demonstrations(language, list(islice(prompts, DEMONSTRATIONS)), rng),
        "preferences.train": preferences(language, list(islice(prompts, TRAIN_PAIRS)), rng),
        "preferences.eval": preferences(language, list(islice(prompts, EVAL_PAIRS)), rng),
        "prompts.train": [{"prompt": prompt} for prompt in islice(prompts, TRAIN_PROMPTS)],
        "prompts.eval": [{"prompt": prompt} for prompt in prompts],
    }.items():
        write_jsonl(folder / f"{name}.jsonl", records)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "init")
    make_model(tokenizer, seed).save_pretrained(folder / "init")


def demonstrations(
    language: Language, prompts: list[str], rng: np.random.Generator
) -> list[dict[str, str]]:
    """The language's own response to each prompt."""
    responses = language.responses(prompts, rng)
    return [
        {"prompt": prompt, "label": label} for prompt, label in zip(prompts, responses, strict=True)
    ]


def preferences(
    language: Language, prompts: list[str], rng: np.random.Generator
) -> list[dict[str, str]]:
    """Two of the language's responses to each prompt; utilities, Bradley-Terry and flips say which
    is chosen.
    """
    first, second = language.responses(prompts, rng), language.responses(prompts, rng)
    difference = np.subtract(language.utility(prompts, first), language.utility(prompts, second))
    first_wins = rng.random(len(prompts)) < 1 / (1 + np.exp(-PREFERENCE_SCALE * difference))
    first_wins ^= rng.random(len(prompts)) < FLIPPED
    return [
        {"prompt": prompt, "chosen": a if wins else b, "rejected": b if wins else a}
        for prompt, a, b, wins in zip(prompts, first, second, first_wins, strict=True)
    ]


def read_jsonl(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_jsonl(path: Path, records: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_tokenizer(words: Sequence[str] = VOCABULARY) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word. Unknown words read as padding, since loaders try it with
    one.
    """
    vocabulary = {word: index for index, word in enumerate([END, PAD, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int, inner: int = 152) -> LlamaForCausalLM:
    """An untrained Llama of 0.1 million parameters."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=inner,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_imitator(
    folder: Path,
    seed: int,
    parts: Mapping[str, Sequence[str]],
    respond: Callable[[list[str]], list[str]],
    settings: Mapping[str, Any],
) -> None:
    """Writes prompts and, in policy/, a small model that imitates the responses to those of `sft`.

    parts: the prompts of each file. respond: one response to each prompt. settings: further options
    of the fine-tuning.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for part, prompts in parts.items():
        records = [{"prompt": prompt} for prompt in prompts]
        if part == "sft":
            said = respond(list(prompts))
            records = [one | {"label": label} for one, label in zip(records, said, strict=True)]
        write_jsonl(folder / f"{part}.jsonl", records)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "init")
    make_model(tokenizer, seed).save_pretrained(folder / "init")
    sft.train(
        SFTConfig(
            model=str(folder / "init"),
            output_dir=str(folder / "sft"),
            train_data=str(folder / "sft.jsonl"),
            seed=seed,
            **settings,
        )
    )
    (folder / "sft" / "model").rename(folder / "policy")


def divided(prompts: Iterable[str], sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """The prompts in order, so many to each name."""
    rest = iter(prompts)
    return {name: list(islice(rest, size)) for name, size in sizes.items()}
