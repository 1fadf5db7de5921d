"""A policy whose samples are text: responses of any bytes are mostly no characters, and never kept
as data.
"""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase


def save_letters(tiny_model: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Saves the tiny model with a head that prefers printable characters, and returns the folder."""
    policy = LlamaForCausalLM.from_pretrained(tiny_model)
    policy.lm_head.weight = torch.nn.Parameter(policy.lm_head.weight.detach().clone())
    policy.config.tie_word_embeddings = False
    number = tokenizer.convert_tokens_to_ids
    unlikely = [
        n
        for n in range(len(tokenizer))
        if n not in {number("<end>"), *map(number, map(chr, range(33, 127)))}
    ]
    with torch.no_grad():
        # stays the first number of all hidden states, up to its scale
        policy.model.embed_tokens.weight[:, 0] = 0.05
        policy.lm_head.weight[unlikely, 0] = -9.0
        policy.lm_head.weight[number("<end>"), 0] = 0.9
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
