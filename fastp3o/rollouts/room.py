"""How much the cache has room for: sizes of its keys and values, and what of the memory it may take."""

import os
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]
import torch

# Of what is free; the rest is for the activations of a step and of prompts, and for logits.
SHARE = 0.7
# Beyond, the weights are no longer most of what a step reads, and more slots make steps longer.
MOST_SLOTS = 256


class LayerShape(NamedTuple):
    """Of the keys of one token in one layer; values are alike."""

    heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Of its keys and values."""
        return 2 * self.heads * self.head_size * self.dtype.itemsize


class Room(NamedTuple):
    """What the cache, and all that is kept for slots and responses, has room for."""

    prompts: int
    prompt_tokens: int
    responses_per_prompt: int
    slots: int
    response_tokens: int

    @property
    def responses(self) -> int:
        return self.prompts * self.responses_per_prompt

    @property
    def tokens(self) -> int:
        """In the cache."""
        return self.prompts * self.prompt_tokens + self.slots * self.response_tokens

    def holds(self, other: "Room") -> bool:
        """Whether what has this room can work in place of what has the other."""
        pairs = zip(self, other, strict=True)
        return self.responses_per_prompt == other.responses_per_prompt and all(mine >= its for mine, its in pairs)


def fitting_room(
    longest_prompt: int,
    response_tokens: int,
    responses_per_prompt: int,
    *,
    prompts: int,
    bytes_per_token: int,
    memory: int,
) -> Room:
    """Room for `prompts` at once with a slot for each of their responses, or for as many as `memory` (bytes) holds.

    There are fewer prompts at once where it holds less, then fewer slots; and one of each where it holds nothing.
    """
    prompt_tokens = max(1, longest_prompt)
    tokens = memory // bytes_per_token
    slots_of_prompt = min(responses_per_prompt, MOST_SLOTS)
    fits = tokens // (prompt_tokens + slots_of_prompt * response_tokens)
    if fits:
        prompts = min(prompts, fits)
        slots = min(prompts * responses_per_prompt, MOST_SLOTS)
    else:
        prompts, slots = 1, max(1, min(slots_of_prompt, (tokens - prompt_tokens) // response_tokens))
    return Room(prompts, prompt_tokens, responses_per_prompt, slots, response_tokens)


def available_memory(device: torch.device) -> int:
    """Bytes that the cache may take of what is free now."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
    else:
        # Processes of one machine share what is free.
        free = psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return int(SHARE * free)
