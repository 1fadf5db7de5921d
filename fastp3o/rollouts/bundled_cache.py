"""The cache where shapes may change from step to step, as on a CPU: attention is one call for prompts and responses.

M responses to a prompt are a bundle: its keys are the prompt's, then the responses' own, those of a step side by side.
One product multiplies them with the queries of all M. The prompt's keys are read once for M responses, and each own key
is multiplied M times, so M is large where prompts are long next to responses. A prompt is stored once a bundle.

B bundles, Lp and Lr the room for tokens of a prompt and of a response, L = Lp + M Lr, H heads (Hkv of keys), D the size
of a head.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastp3o.models.attention import softcapped
from fastp3o.rollouts.cache import Cache, LayerShape
from fastp3o_kernels.decoding import Slots

# A distance from a key to the tokens that never see it.
NEVER = -(2**40)


class BundledLayer(NamedTuple):
    """[1, Hkv, B L, D] each."""

    keys: Tensor
    values: Tensor


class BundledCache(Cache):
    """A Cache in which slot number r works on response r, or on none."""

    def tokens(self) -> int:
        room = self.room
        self.copies = prompt_copies(room.prompt_tokens, room.response_tokens, room.responses_per_prompt)
        self.members = room.responses_per_prompt // self.copies
        self.length = room.prompt_tokens + self.members * room.response_tokens
        return room.prompts * self.copies * self.length

    def layer_cache(self, memory: Tensor, shape: LayerShape) -> BundledLayer:
        keys, values = memory.view(2, 1, shape.heads, -1, shape.head_size)
        return BundledLayer(keys, values)

    def begin(self, prompt_lengths: list[int]) -> None:
        super().begin(prompt_lengths)
        room, M, device = self.room, self.members, self.memory.device
        copies = torch.tensor(prompt_lengths + [0] * (room.prompts - len(prompt_lengths)), device=device)
        from_prompt = copies.repeat_interleave(self.copies)[:, None] - torch.arange(
            room.prompt_tokens, device=device
        )
        from_prompt = from_prompt.where(from_prompt > 0, NEVER)[:, None].expand(-1, M, -1)
        own = torch.arange(room.response_tokens, device=device).repeat_interleave(M)
        others = torch.eye(M, device=device).repeat(1, room.response_tokens) == 0
        from_own = (-own).masked_fill(others, NEVER).expand(len(from_prompt), -1, -1)
        # Number of tokens from each key to each member's first own token, [B, M, L].
        self.distances = torch.cat([from_prompt, from_own], dim=2)
        numbers = torch.arange(room.slots, device=device)
        bundles, members = numbers // M, numbers % M
        self.first_own = bundles * self.length + room.prompt_tokens + members
        self.keep_slots(numbers)

    def keep_slots(self, responses: Tensor) -> None:
        """The numbers of the responses that slots work on from now on, [R] int64 in ascending order."""
        M, first, last = self.members, int(responses[0]) // self.members, int(responses[-1]) // self.members + 1
        self.bundles, self.begins = slice(first, last), self.first_own[responses]
        # The place of each slot's response in these bundles, and the slot of each place; None where they are the same.
        self.place, self.slot = responses - first * M, None
        if len(responses) < (last - first) * M:
            self.slot = responses.new_zeros((last - first) * M)
            self.slot[self.place] = torch.arange(len(responses), device=responses.device)
        self.views = {
            layer: [
                tensor[0].unflatten(1, (-1, self.length)).transpose(0, 1)[self.bundles]
                for tensor in (kv.keys, kv.values)
            ]
            for layer, kv in self.layers.items()
        }

    def begin_step(self, slots: Slots, own_tokens: int) -> None:
        self.slots, self.masks = slots, {}
        self.newest = torch.add(self.begins, slots.steps, alpha=self.members)
        self.used = min(self.room.prompt_tokens + self.members * (own_tokens + 1), self.length)

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.room.prompts, self.copies, self.length
        for stored, tensor in zip(self.layers[layer], (key, value), strict=True):
            place = slice(None), self.prompt_of_token, slice(None), self.position_of_token
            stored[0].unflatten(1, shape)[place] = tensor[: len(self.prompt_of_token), :, None].to(stored.dtype)
        return key, value

    def store_own(self, layer: int, slot: Tensor, step: Tensor, key: Tensor, value: Tensor) -> None:
        place = self.first_own[slot] + step * self.members
        for stored, tensor in zip(self.layers[layer], (key, value), strict=True):
            stored[0].index_copy_(1, place, tensor.transpose(0, 1).to(stored.dtype))

    def cached(self, layer: int, prompt: int, prompt_tokens: int, slot: int, own_tokens: int) -> list[list[Tensor]]:
        own = int(self.first_own[slot])
        begin, end, M = slot // self.members * self.length, own + own_tokens * self.members, self.members
        return [[t[0, :, begin : begin + prompt_tokens], t[0, :, own:end:M]] for t in self.layers[layer]]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        kv, H = self.layers[layer], query.shape[1]
        kv.keys.index_copy_(2, self.newest, key.to(kv.keys.dtype))
        kv.values.index_copy_(2, self.newest, value.to(kv.keys.dtype))
        keys, values = (view.narrow(2, 0, self.used) for view in self.views[layer])
        query = query.to(keys.dtype)
        if self.slot is not None:
            query = query.index_select(2, self.slot)
        query = query.view(H, len(keys), self.members, -1).transpose(0, 1)
        if window not in self.masks:
            self.masks[window] = self.mask(window).to(keys.dtype)
        if softcap:
            result = softcapped(query, keys, values, self.masks[window], scale, softcap)
        else:
            grouped = keys.shape[1] != H
            mask = self.masks[window]
            result = F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=grouped)
        result = result.transpose(1, 2).reshape(1, -1, H, result.shape[3])
        return result if self.slot is None else result.index_select(1, self.place)

    def mask(self, window: int | None) -> Tensor:
        """[B, 1, M, L] of those in use: 0 for keys that a member's newest token sees, -inf for others."""
        steps = self.slots.steps
        if self.slot is not None:
            steps = steps.index_select(0, self.slot)
        distances = self.distances[self.bundles, :, : self.used] + steps.view(-1, self.members, 1)
        seen = distances >= 0
        if window is not None:
            seen &= distances < window
        return seen.log().unsqueeze(1)


def prompt_copies(prompt_tokens: int, response_tokens: int, responses_per_prompt: int) -> int:
    """Bundles of each prompt. A bundle's own keys, half of their room on average, are at most as many as its prompt's:
    with more of them, products with those of others take longer than to read the prompt again.
    """
    K = responses_per_prompt
    return min(n for n in range(1, K + 1) if K % n == 0 and (n == K or K // n * response_tokens <= 2 * prompt_tokens))
