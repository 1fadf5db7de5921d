"""The cache where shapes may change from step to step, as on a CPU: attention is one call for
prompts and responses.

M responses to a prompt are a bundle: its keys are the prompt's, then the responses' own, those of a
step side by side. One product multiplies them with the queries of all M. The prompt's keys are read
once for M responses, and each own key is multiplied M times, so M is large where prompts are long
next to responses. A prompt is stored once a bundle.

Prompts of similar lengths have the same room, the longest one's: a prompt of 2,048 tokens makes
none of 64 attend to as many. Each such width has bundles of its own, in the same memory, and a call
of its own.

B bundles of a width, Lp and Lr the room for tokens of a prompt and of a response, L = Lp + M Lr, H
heads (Hkv of keys), D the size of a head.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastp3o.models.attention import softcapped
from fastp3o.rollouts.cache import Cache, LayerShape, Room
from fastp3o_kernels.decoding import Slots

# Bytes; as torch aligns a tensor's memory, on which the rounding of products may depend.
ALIGNMENT = 64
# A step that none reaches: whoever sees a key from then on never sees it.
NEVER = 2**40
# A further width is worth the call that it takes in each layer of a step if it saves as many
# products of a query and a key, and if its prompts are at most as long as this share of those
# before it.
PRODUCTS_OF_A_CALL = 2048
NEXT_WIDTH = 0.5


# --- the cache ------------------------------------------------------------------------------------


class BundledCache(Cache):
    """A Cache in which slot number r works on response r, or on none."""

    def tokens(self) -> int:
        # What one width takes is never less than what several do.
        room = self.room
        copies = prompt_copies(room.prompt_tokens, room.response_tokens, room.responses_per_prompt)
        self.prompt_room = copies * room.prompt_tokens
        return room.prompts * self.prompt_room + room.responses * room.response_tokens

    def zeros(self, size: int, device: torch.device) -> Tensor:
        """Bytes that the system hands out once they are written: most of what the longest prompt
        and the longest possible response would need no batch ever has.
        """
        memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)
        begin = -memory.ctypes.data % ALIGNMENT
        return torch.from_numpy(memory[begin : begin + size]).to(device)

    def cut(self, shapes: dict[int, LayerShape], sizes: list[int]) -> None:
        # Layers of one shape lie side by side: a step cuts its views of all of them at once.
        self.stacks: list[tuple[list[int], Tensor]] = []  # [2 n, Hkv, tokens, D] of n layers
        # keys and values by layer, [1, Hkv, tokens, D] each
        self.stored: dict[int, tuple[Tensor, ...]] = {}
        begin = 0
        for shape in dict.fromkeys(shapes.values()):
            layers = [layer for layer in shapes if shapes[layer] == shape]
            end = begin + sum(
                size for layer, size in zip(shapes, sizes, strict=True) if layer in layers
            )
            stack = (
                self.memory[begin:end]
                .view(shape.dtype)
                .view(2 * len(layers), shape.heads, -1, shape.head_size)
            )
            self.stored |= zip(layers, pairs(stack[:, None]), strict=True)
            self.stacks.append((layers, stack))
            begin = end

    def begin(self, prompt_lengths: list[int]) -> None:
        super().begin(prompt_lengths)
        room, device = self.room, self.memory.device
        K = room.responses_per_prompt
        lengths = torch.tensor(
            prompt_lengths + [0] * (room.prompts - len(prompt_lengths)), device=device
        )
        self.widths: list[Width] = []
        # Of each prompt: its width, and its place among that one's. [P, K]: a response's bundle
        # among those of all widths, its place in it, and how many there are.
        self.width_of_prompt = torch.empty_like(lengths)
        self.place_of_prompt = torch.empty_like(lengths)
        bundle, member, members = (lengths.new_empty(room.prompts, K) for _ in range(3))
        begin = bundles = 0
        for number, prompts in enumerate(by_width(prompt_lengths, room)):
            width = Width(lengths[prompts], room, self.prompt_room, begin, self.stacks)
            self.widths.append(width)
            self.width_of_prompt[prompts] = number
            self.place_of_prompt[prompts] = torch.arange(len(prompts)).to(device)
            responses = torch.arange(len(prompts) * K, device=device).view(-1, K)
            bundle[prompts] = bundles + responses // width.members
            member[prompts] = responses % width.members
            members[prompts] = width.members
            begin, bundles = width.end, bundles + len(width.places)
        self.bundle_of = bundle.flatten()
        self.member_of = member.flatten()
        self.members_of = members.flatten()
        self.keep_slots(torch.arange(room.slots, device=device))

    def keep_slots(self, responses: Tensor) -> None:
        bundles, member = self.bundle_of[responses], self.member_of[responses]
        needed = bundles.unique()
        first = used = 0
        first_members = []  # of each bundle, among those in use
        for width in self.widths:
            last = first + len(width.places)
            width.keep(needed[(needed >= first) & (needed < last)] - first)
            first_members.append(used + width.places * width.members)
            first, used = last, used + width.used * width.members
        self.used_widths = [width for width in self.widths if width.used]
        self.first_newest, self.stride = self.first_own(responses), self.members_of[responses]
        # Where each slot's response is among these bundles' members, and each member's slot; None:
        # they are the same.
        self.member, self.slot = torch.cat(first_members)[bundles] + member, None
        slots = torch.arange(len(responses), device=responses.device)
        if len(responses) < used or not torch.equal(self.member, slots):
            self.slot = responses.new_zeros(used)
            self.slot[self.member] = slots

    def first_own(self, responses: Tensor) -> Tensor:
        """Where keys of the responses' first own tokens are among all."""
        first_own = torch.cat([width.first_own() for width in self.widths])
        return first_own[self.bundle_of[responses]] + self.member_of[responses]

    def begin_step(self, slots: Slots, own_tokens: int) -> None:
        self.slots = slots
        self.newest = torch.addcmul(self.first_newest, slots.steps, self.stride)
        steps = slots.steps if self.slot is None else slots.steps.index_select(0, self.slot)
        counts = [width.used * width.members for width in self.used_widths]
        for width, of_width in zip(self.used_widths, steps.split(counts), strict=True):
            width.begin_step(of_width, own_tokens)
        self.counts = counts

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        widths = self.width_of_prompt[self.prompt_of_token]
        places = self.place_of_prompt[self.prompt_of_token]
        for number, width in enumerate(self.widths):
            chosen = (widths == number).nonzero().squeeze(1)
            place = slice(None), places[chosen], slice(None), self.position_of_token[chosen]
            for stored, tensor in zip(self.stored[layer], (key, value), strict=True):
                width.by_prompt(stored[0])[place] = tensor[chosen, :, None].to(stored.dtype)
        return key, value

    def store_own(self, layer: int, slot: Tensor, step: Tensor, key: Tensor, value: Tensor) -> None:
        place = self.first_own(slot) + step * self.members_of[slot]
        for stored, tensor in zip(self.stored[layer], (key, value), strict=True):
            stored.index_copy_(2, place, tensor.transpose(0, 1)[None].to(stored.dtype))
        for width in self.widths:
            width.has_written(max(step.tolist(), default=-1) + 1)

    def cached(
        self, layer: int, prompt: int, prompt_tokens: int, slot: int, own_tokens: int
    ) -> list[list[Tensor]]:
        width = self.widths[int(self.width_of_prompt[prompt])]
        own = int(self.first_own(torch.tensor([slot])))
        begin = own - int(self.member_of[slot]) - width.prompt_tokens
        end = own + width.members * own_tokens
        both = (tensor[0] for tensor in self.stored[layer])
        return [
            [kv[:, begin : begin + prompt_tokens], kv[:, own : end : width.members]] for kv in both
        ]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        keys, values = self.stored[layer]
        dtype = keys.dtype
        query, key, value = (x if x.dtype == dtype else x.to(dtype) for x in (query, key, value))
        keys.index_copy_(2, self.newest, key)
        values.index_copy_(2, self.newest, value)

        # From the slots' order to that of the bundles' members, and back.
        if self.slot is not None:
            query = query.index_select(2, self.slot)
        results = []
        for width, part in zip(self.used_widths, query.split(self.counts, dim=2), strict=True):
            results.append(
                width.attend(layer, part, options["scale"], options["window"], options["softcap"])
            )
        result = results[0] if len(results) == 1 else torch.cat(results, dim=1)
        return result if self.slot is None else result.index_select(1, self.member)


# --- responses of one length of prompt ------------------------------------------------------------


class Width:
    """Bundles with the same room for a prompt.

    lengths: [P] of the prompts. most: tokens that all copies of a prompt may take. begin: their
    first token among all that keys are kept of. stacks: the keys and values of all.
    """

    def __init__(
        self,
        lengths: Tensor,
        room: Room,
        most: int,
        begin: int,
        stacks: Sequence[tuple[list[int], Tensor]],
    ) -> None:
        K, device = room.responses_per_prompt, lengths.device
        self.prompt_tokens = max(1, int(lengths.max()))
        self.copies = prompt_copies(self.prompt_tokens, room.response_tokens, K)
        if self.copies * self.prompt_tokens > most:
            self.copies = most // room.prompt_tokens  # as many as the longest has
        self.members = M = K // self.copies
        self.length = self.prompt_tokens + M * room.response_tokens
        count = len(lengths) * self.copies
        self.begin, self.end = begin, begin + count * self.length
        # [2 n, B, Hkv, L, D]
        self.stacks = [(layers, self.by_bundle(stack).transpose(1, 2)) for layers, stack in stacks]
        prompt = (
            torch.arange(self.prompt_tokens, device=device)
            - lengths.repeat_interleave(self.copies)[:, None]
        )
        prompt = prompt.where(prompt < 0, NEVER)[:, None].expand(-1, M, -1)
        steps, members = (torch.arange(n, device=device) for n in (room.response_tokens, M))
        own = (
            steps[:, None]
            .where(members == members[:, None, None], NEVER)
            .flatten(1)
            .expand(len(prompt), -1, -1)
        )
        # The step from which each member sees each key, [B, 1, M, L]: for the prompt's, less than 0
        # by their distance.
        self.first_seen = torch.cat([prompt, own], dim=2)[:, None]
        # The bundle at each place, and the place of each bundle.
        self.bundles = torch.arange(count, device=device)
        self.places = self.bundles.clone()
        self.written = self.prompt_tokens  # keys of each bundle

    def by_bundle(self, kept: Tensor) -> Tensor:
        """[..., tokens, D] of all -> [..., B, L, D]."""
        return kept[..., self.begin : self.end, :].unflatten(-2, (-1, self.length))

    def by_prompt(self, kept: Tensor) -> Tensor:
        """[..., tokens, D] of all -> [..., P, copies, L, D]."""
        return self.by_bundle(kept).unflatten(-3, (-1, self.copies))

    def first_own(self) -> Tensor:
        """[B], where each bundle's own keys begin among all."""
        return self.begin + self.places * self.length + self.prompt_tokens

    def keep(self, needed: Tensor) -> None:
        """Bundles that are needed, [n], change places with others, so that they are the first."""
        self.used, places = len(needed), self.places[needed]
        beyond = places[places >= self.used]
        if len(beyond):
            holes = (~torch.isin(self.bundles[: self.used], needed)).nonzero().squeeze(1)
            to, source = torch.cat([holes, beyond]), torch.cat([beyond, holes])
            # All see their own keys alike.
            for tensor in (self.bundles, self.first_seen[..., : self.prompt_tokens]):
                tensor[to] = tensor[source]
            for _, stack in self.stacks:
                written = stack[..., : self.written, :]
                written[:, to] = written[:, source]
            self.places[self.bundles] = torch.arange(len(self.bundles), device=to.device)
        self.used_first_seen = self.first_seen[: self.used]
        self.used_stacks = [(layers, stack[:, : self.used]) for layers, stack in self.stacks]

    def has_written(self, own_tokens: int) -> None:
        self.written = max(self.written, self.keys_of(own_tokens))

    def keys_of(self, own_tokens: int) -> int:
        """Keys of a bundle with as many own tokens of each member."""
        return min(self.prompt_tokens + self.members * own_tokens, self.length)

    def begin_step(self, steps: Tensor, own_tokens: int) -> None:
        """steps: of the members in use."""
        self.steps = steps.view(-1, 1, self.members, 1)
        self.masks: dict[int | None, Tensor] = {}  # by window
        self.keys = self.keys_of(own_tokens + 1)
        self.has_written(own_tokens + 1)
        self.views: dict[int, tuple[Tensor, Tensor]] = {}
        for layers, stack in self.used_stacks:
            self.views |= zip(layers, pairs(stack.narrow(3, 0, self.keys)), strict=True)

    def attend(
        self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """[1, H, B M, D] of the members in use -> [1, B M, H, D]."""
        keys, values = self.views[layer]
        H = query.shape[1]
        query = query.view(H, len(keys), self.members, -1).transpose(0, 1)
        if window not in self.masks:
            self.masks[window] = self.mask(window).to(keys.dtype)
        tensors, grouped = (query, keys, values, self.masks[window]), keys.shape[1] != H
        if softcap:
            result = softcapped(*tensors, scale, softcap)
        else:
            result = F.scaled_dot_product_attention(*tensors, scale=scale, enable_gqa=grouped)
        return result.transpose(1, 2).reshape(1, -1, H, query.shape[3])

    def mask(self, window: int | None) -> Tensor:
        """[B, 1, M, keys] of those in use: 0 for keys that a member's newest token sees, -inf for
        others.
        """
        first = self.used_first_seen.narrow(3, 0, self.keys)
        seen = self.steps >= first
        if window is not None:
            seen &= self.steps < first + window
        return seen.log()


# --- how prompts are bundled ----------------------------------------------------------------------


def by_width(lengths: Sequence[int], room: Room) -> list[list[int]]:
    """The numbers of the room's prompts by their width, the longest first. lengths: of those that
    there are.
    """
    order = sorted(range(len(lengths)), key=lambda prompt: -lengths[prompt])
    widths: list[list[int]] = []
    longest = 0
    for place, prompt in enumerate(order):
        saved = (len(order) - place) * room.responses_per_prompt * (longest - lengths[prompt])
        if not widths or (lengths[prompt] <= NEXT_WIDTH * longest and saved >= PRODUCTS_OF_A_CALL):
            widths.append([])
            longest = lengths[prompt]
        widths[-1].append(prompt)
    widths[-1] += range(len(lengths), room.prompts)
    return [sorted(prompts) for prompts in widths]


def pairs(stack: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of each layer, [2 n, ...]."""
    parts = stack.unbind()
    return zip(parts[::2], parts[1::2], strict=True)


def prompt_copies(prompt_tokens: int, response_tokens: int, responses_per_prompt: int) -> int:
    """Bundles of each prompt. A bundle's own keys, half of their room on average, are at most as
    many as its prompt's: with more of them, products with those of others take longer than to read
    the prompt again.
    """
    K = responses_per_prompt
    return min(
        n
        for n in range(1, K + 1)
        if K % n == 0 and (n == K or K // n * response_tokens <= 2 * prompt_tokens)
    )
