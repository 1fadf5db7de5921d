"""The policy that is trained, and the prompts and responses that it is trained on."""

import random
from typing import NamedTuple

from transformers import LlamaConfig

from benchmarks.shapes import LARGE, TRIAL
from fastp3o.packing.packed_row import Ids


class Lengths(NamedTuple):
    """Mean tokens of a prompt and of a response."""

    prompt: int
    response: int


# TL;DR's, about which the goals are; prompts as short as the responses; long prompts.
LENGTHS = [Lengths(24, 8)] if TRIAL else [Lengths(350, 40), Lengths(128, 128), Lengths(1024, 256)]
# K, to each prompt.
RESPONSES = [2, 4]
# Tokens of an update, about, if nothing is shared or padded; and of one of its passes.
LARGE_TOKENS = 16384
TOKENS = LARGE_TOKENS if LARGE else 256 if TRIAL else 6144
TOKENS_PER_PASS = TOKENS // 2


def llama(
    hidden: int, intermediate: int, layers: int, heads: int, key_heads: int, vocabulary: int
) -> LlamaConfig:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    config.num_labels = 1  # of a reward model
    return config


# What an interpreter of kernels can train.
TINY = llama(32, 48, 1, 2, 1, 203)
ONE_B = llama(2048, 8192, 16, 32, 8, 128256)  # Llama 3.2 1B
# On a CPU the quickstart's.
CONFIG = ONE_B if LARGE else TINY if TRIAL else llama(128, 384, 4, 4, 4, 4096)


def random_groups(
    lengths: Lengths, responses: int, tokens: int = TOKENS
) -> tuple[list[Ids], list[list[Ids]]]:
    """Prompts and the K responses of each, uniformly from half to one and a half times the mean
    lengths.
    """
    generator = random.Random(0)

    def ids(mean: int) -> Ids:
        return generator.choices(
            range(CONFIG.vocab_size), k=generator.randint(mean // 2, 3 * mean // 2)
        )

    prompts = round(tokens / (responses * sum(lengths)))
    return [ids(lengths.prompt) for _ in range(prompts)], [
        [ids(lengths.response) for _ in range(responses)] for _ in range(prompts)
    ]
