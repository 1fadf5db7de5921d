"""Rectangles in place of packed rows, as the first author's trainer made them: what packing is
measured against.

Prompts end, and responses begin, in the same column; the model runs as transformers has it, with an
attention mask, and applies its head to every token. A pass is padded to its own longest prompt and
response, not to the update's.

P pairs of a pass, S = 2P sequences, padded to Tp tokens of a prompt and Tr of a response; V
vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.shapes import DEVICE
from fastp3o.packing.packed_row import Ids

PADDING = 0


@dataclass
class Rectangle:
    """Sequence 2p is response 1 of pair p, sequence 2p + 1 its response 2."""

    input_ids: Tensor  # [S, Tp + Tr] int64
    attention_mask: Tensor  # [S, Tp + Tr] int64, 0 where padded
    position_ids: Tensor  # [S, Tp + Tr] int64
    prompt_length: int  # Tp


def pad(prompts: Sequence[Ids], pairs: Sequence[Sequence[Ids]]) -> Rectangle:
    """P prompts and the two responses of each."""
    prompt_length, response_length = longest(prompts, pairs)
    ids, mask = [], []
    for prompt, pair in zip(prompts, pairs, strict=True):
        for response in pair:
            before, after = prompt_length - len(prompt), response_length - len(response)
            ids.append([PADDING] * before + prompt + response + [PADDING] * after)
            mask.append([0] * before + [1] * (len(prompt) + len(response)) + [0] * after)
    attention_mask = torch.tensor(mask, device=DEVICE)
    return Rectangle(
        input_ids=torch.tensor(ids, device=DEVICE),
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0),
        prompt_length=prompt_length,
    )


def longest(prompts: Sequence[Ids], pairs: Sequence[Sequence[Ids]]) -> tuple[int, int]:
    return max(map(len, prompts)), max(len(response) for pair in pairs for response in pair)


def split(prompts: Sequence[Ids], pairs: Sequence[Sequence[Ids]], tokens: int) -> list[range]:
    """Pairs of each pass, in their order, as many as `tokens` hold with their padding; one at
    least.
    """
    passes, first = [], 0
    for last in range(1, len(prompts) + 1):
        # Whether the next pair no longer fits.
        following = slice(first, last + 1)
        size = 2 * (last + 1 - first) * sum(longest(prompts[following], pairs[following]))
        if last == len(prompts) or size > tokens:
            passes.append(range(first, last))
            first = last
    return passes


def pair_logprobs(model: PreTrainedModel, batch: Rectangle) -> Tensor:
    """[P, 2] fp32, of logits [S, Tp + Tr, V]."""
    logits = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
    ).logits.float()
    responses, mask = (
        tensor[:, batch.prompt_length :] for tensor in (batch.input_ids, batch.attention_mask)
    )
    logprobs = (
        logits[:, batch.prompt_length - 1 : -1]
        .log_softmax(-1)
        .gather(-1, responses.unsqueeze(-1))
        .squeeze(-1)
    )
    return (logprobs * mask).sum(1).view(-1, 2)
