"""The model that `FASTP3O_REAL_MODEL` names, texts for it, and what plain transformers says of them."""

import os

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastp3o.data.loading import load_preferences
from fastp3o.sources import InMemory

MODEL = os.environ.get("FASTP3O_REAL_MODEL", "")
needs_model = [
    pytest.mark.real,
    pytest.mark.skipif(not MODEL, reason="needs FASTP3O_REAL_MODEL: bash scripts/test_real.sh"),
]

PAIRS = [
    {
        "prompt": "\n\nHuman: What is the best way to learn to swim?\n\nAssistant:",
        "chosen": " Take lessons in a shallow pool, and practise breathing out under water until it feels easy.",
        "rejected": " Jump off a bridge.",
    },
    {
        "prompt": "\n\nHuman: Wie heißt die Hauptstadt von Österreich?\n\nAssistant:",
        "chosen": " Wien. Sie liegt an der Donau, und fast zwei Millionen Menschen leben dort.",
        "rejected": " Das weiß ich nicht 🙂",
    },
    {
        "prompt": "def mean(values):\n    ",
        "chosen": "if not values:\n        return 0.0\n    return sum(values) / len(values)\n",
        "rejected": "return  values[0]\n",
    },
]


def examples(
    tokenizer: PreTrainedTokenizerBase, pairs: list[dict]
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """The ids of prompts, [P], and of their two responses, [P][2]."""
    data, _ = load_preferences(
        InMemory("pairs", pairs), tokenizer, max_prompt_tokens=2000, max_response_tokens=64
    )
    loaded = data[:]
    responses = zip(loaded["chosen_ids"], loaded["rejected_ids"], strict=True)
    return loaded["prompt_ids"], [list(pair) for pair in responses]


def logprobs(model: PreTrainedModel, prompt: list[int], response: list[int]) -> Tensor:
    """Of a response's tokens, by plain transformers, alone and without a cache."""
    hidden = model.model(torch.tensor([prompt + response]), use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[0, len(prompt) - 1 : -1])
    return logits.log_softmax(-1).gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)
