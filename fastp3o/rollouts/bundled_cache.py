"""The cache where shapes may change from step to step, as on a CPU: attention is one call for prompts and responses.

M responses to a prompt are a bundle: its keys are the prompt's, then the responses' own, those of a step side by side.
One product multiplies them with the queries of all M. The prompt's keys are read once for M responses, and each own key
is multiplied M times, so M is large where prompts are long next to responses. A prompt is stored once a bundle.

B bundles, Lp and Lr the room for tokens of a prompt and of a response, L = Lp + M Lr, H heads (Hkv of keys), D the size
of a head.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastp3o.models.attention import softcapped
from fastp3o.rollouts.cache import Cache, LayerShape
from fastp3o_kernels.decoding import Slots

# A step that none reaches: whoever sees a key from then on never sees it.
NEVER = 2**40


class BundledCache(Cache):
    """A Cache in which slot number r works on response r, or on none."""

    def tokens(self) -> int:
        room = self.room
        self.copies = prompt_copies(room.prompt_tokens, room.response_tokens, room.responses_per_prompt)
        self.members = room.responses_per_prompt // self.copies
        self.length = room.prompt_tokens + self.members * room.response_tokens
        return room.prompts * self.copies * self.length

    def cut(self, shapes: dict[int, LayerShape], sizes: list[int]) -> None:
        # Layers of one shape lie side by side: a step cuts its views of all of them at once.
        self.stacks: list[tuple[list[int], Tensor]] = []
        self.stored: dict[int, tuple[Tensor, ...]] = {}  # keys and values by layer, [1, Hkv, B L, D] each
        begin = 0
        for shape in dict.fromkeys(shapes.values()):
            layers = [layer for layer in shapes if shapes[layer] == shape]
            end = begin + sum(size for layer, size in zip(shapes, sizes, strict=True) if layer in layers)
            stack = self.memory[begin:end].view(shape.dtype).view(2 * len(layers), shape.heads, -1, shape.head_size)
            self.stored |= zip(layers, pairs(stack[:, None]), strict=True)
            # [2 n, B, Hkv, L, D]
            self.stacks.append((layers, stack.unflatten(2, (-1, self.length)).transpose(1, 2)))
            begin = end

    def begin(self, prompt_lengths: list[int]) -> None:
        super().begin(prompt_lengths)
        room, M, device = self.room, self.members, self.memory.device
        lengths = torch.tensor(prompt_lengths + [0] * (room.prompts - len(prompt_lengths)), device=device)
        prompt = torch.arange(room.prompt_tokens, device=device) - lengths.repeat_interleave(self.copies)[:, None]
        prompt = prompt.where(prompt < 0, NEVER)[:, None].expand(-1, M, -1)
        steps, members = (torch.arange(n, device=device) for n in (room.response_tokens, M))
        own = steps[:, None].where(members == members[:, None, None], NEVER).flatten(1).expand(len(prompt), -1, -1)
        # The step from which each member sees each key, [B, 1, M, L]: for the prompt's, less than 0 by their distance.
        self.first_seen = torch.cat([prompt, own], dim=2)[:, None]
        # The bundle at each place, and the place of each bundle.
        self.bundles = torch.arange(len(self.first_seen), device=device)
        self.places = self.bundles.clone()
        self.keep_slots(torch.arange(room.slots, device=device))

    def keep_slots(self, responses: Tensor) -> None:
        M, needed = self.members, (responses // self.members).unique()
        # Bundles that are needed change places with others, so that they are the first.
        count, places = len(needed), self.places[needed]
        beyond = places[places >= count]
        if len(beyond):
            holes = (~torch.isin(self.bundles[:count], needed)).nonzero().squeeze(1)
            to, source = torch.cat([holes, beyond]), torch.cat([beyond, holes])
            for tensor in (self.bundles, self.first_seen):
                tensor[to] = tensor[source]
            for _, stack in self.stacks:
                stack[:, to] = stack[:, source]
            self.places[self.bundles] = torch.arange(len(self.bundles), device=to.device)
        self.used_first_seen = self.first_seen[:count]
        self.used_stacks = [(layers, stack[:, :count]) for layers, stack in self.stacks]
        self.first_newest = self.first_own(responses)
        # Where each slot's response is among these bundles' members, and each member's slot; None: they are the same.
        self.member, self.slot = self.places[responses // M] * M + responses % M, None
        slots = torch.arange(len(responses), device=responses.device)
        if len(responses) < count * M or not torch.equal(self.member, slots):
            self.slot = responses.new_zeros(count * M)
            self.slot[self.member] = slots

    def first_own(self, responses: Tensor) -> Tensor:
        """Where keys of the responses' first own tokens are among all B L."""
        begins = self.places[responses // self.members] * self.length + self.room.prompt_tokens
        return begins + responses % self.members

    def begin_step(self, slots: Slots, own_tokens: int) -> None:
        self.slots = slots
        self.masks: dict[int | None, Tensor] = {}  # by window
        self.newest = torch.add(self.first_newest, slots.steps, alpha=self.members)
        self.used = min(self.room.prompt_tokens + self.members * (own_tokens + 1), self.length)
        self.views: dict[int, tuple[Tensor, Tensor]] = {}
        for layers, stack in self.used_stacks:
            self.views |= zip(layers, pairs(stack.narrow(3, 0, self.used)), strict=True)

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.room.prompts, self.copies, self.length
        for stored, tensor in zip(self.stored[layer], (key, value), strict=True):
            place = slice(None), self.prompt_of_token, slice(None), self.position_of_token
            stored[0].unflatten(1, shape)[place] = tensor[: len(self.prompt_of_token), :, None].to(stored.dtype)
        return key, value

    def store_own(self, layer: int, slot: Tensor, step: Tensor, key: Tensor, value: Tensor) -> None:
        place = self.first_own(slot) + step * self.members
        for stored, tensor in zip(self.stored[layer], (key, value), strict=True):
            stored.index_copy_(2, place, tensor.transpose(0, 1)[None].to(stored.dtype))

    def cached(self, layer: int, prompt: int, prompt_tokens: int, slot: int, own_tokens: int) -> list[list[Tensor]]:
        place, own = int(self.places[slot // self.members]), self.room.prompt_tokens + slot % self.members
        bundles = (tensor[0].unflatten(1, (-1, self.length))[:, place] for tensor in self.stored[layer])
        return [[kv[:, :prompt_tokens], kv[:, own :: self.members][:, :own_tokens]] for kv in bundles]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        keys, values = self.views[layer]
        H, dtype = query.shape[1], keys.dtype
        query, key, value = (x if x.dtype == dtype else x.to(dtype) for x in (query, key, value))
        for stored, new in zip(self.stored[layer], (key, value), strict=True):
            stored.index_copy_(2, self.newest, new)
        if self.slot is not None:
            query = query.index_select(2, self.slot)
        query = query.view(H, len(keys), self.members, -1).transpose(0, 1)
        scale, window, softcap = (options[name] for name in ("scale", "window", "softcap"))
        if window not in self.masks:
            self.masks[window] = self.mask(window).to(keys.dtype)
        tensors, grouped = (query, keys, values, self.masks[window]), keys.shape[1] != H
        if softcap:
            result = softcapped(*tensors, scale, softcap)
        else:
            result = F.scaled_dot_product_attention(*tensors, scale=scale, enable_gqa=grouped)
        result = result.transpose(1, 2).reshape(1, -1, H, query.shape[3])
        return result if self.slot is None else result.index_select(1, self.member)

    def mask(self, window: int | None) -> Tensor:
        """[B, 1, M, L] of those in use: 0 for keys that a member's newest token sees, -inf for others."""
        steps = self.slots.steps
        if self.slot is not None:
            steps = steps.index_select(0, self.slot)
        steps = steps.view(-1, 1, self.members, 1)
        first = self.used_first_seen.narrow(3, 0, self.used)
        seen = steps >= first
        if window is not None:
            seen &= steps < first + window
        return seen.log()


def pairs(stack: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of each layer, [2 n, ...]."""
    parts = stack.unbind()
    return zip(parts[::2], parts[1::2], strict=True)


def prompt_copies(prompt_tokens: int, response_tokens: int, responses_per_prompt: int) -> int:
    """Bundles of each prompt. A bundle's own keys, half of their room on average, are at most as many as its prompt's:
    with more of them, products with those of others take longer than to read the prompt again.
    """
    K = responses_per_prompt
    return min(n for n in range(1, K + 1) if K % n == 0 and (n == K or K // n * response_tokens <= 2 * prompt_tokens))
