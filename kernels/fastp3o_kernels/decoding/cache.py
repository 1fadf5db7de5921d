"""What a decoding step reads beside the model: cached keys and values, and what each slot works on.

R slots decode one token each per step; a slot works on one response after the other. P prompts, K responses to each;
response k of prompt p has the number p K + k. Hkv heads of keys, D the size of a head, Lp and Lr the cache's room for
tokens of a prompt and of a response.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class LayerCache:
    """Keys and values of one layer, contiguous. What was never written must be finite (its weight is 0, and 0 times NaN
    is NaN): allocate with `zeros`.
    """

    prompt_keys: Tensor  # [P, Hkv, Lp, D], of the prompts without their last tokens; Lp may be 0
    prompt_values: Tensor
    own_keys: Tensor  # [R, Hkv, Lr, D], from a prompt's last token on
    own_values: Tensor

    @staticmethod
    def zeros(
        prompts: int,
        prompt_tokens: int,
        slots: int,
        response_tokens: int,
        heads: int,
        head_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "LayerCache":
        """P, Lp, R, Lr, Hkv, D."""
        shapes = 2 * [(prompts, heads, prompt_tokens, head_size)] + 2 * [(slots, heads, response_tokens, head_size)]
        return LayerCache(*(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes))


@dataclass(frozen=True)
class Slots:
    """What the slots of one step work on; the same for all layers. A slot without a response is idle.

    response: [R] int64, p K + k; P K where idle. No response is in two slots.
    cached_lengths: [P + 1] int64, for each prompt how many of the keys in the cache are its own; 0 at P.
    steps: [R] int64, own tokens in the cache before this step; the step's token is at position length + step.
    responses_per_prompt: K.

    Bounds that the host may know, so that PyTorch computes less (None: everything that there is room for):
    prompts: a range of prompts among which are all that slots work on.
    longest_prompt: no prompt in that range has more cached keys.
    longest_response: no slot has more own tokens, this step's included.
    """

    response: Tensor
    cached_lengths: Tensor
    steps: Tensor
    responses_per_prompt: int
    prompts: range | None = None
    longest_prompt: int | None = None
    longest_response: int | None = None
    # What PyTorch adds to products, by window: made by the first layer that needs it.
    masks: dict[int | None, Tensor] = field(default_factory=dict, compare=False)

    @cached_property
    def prompt(self) -> Tensor:
        """[R] int64, P where idle."""
        return self.response // self.responses_per_prompt

    @cached_property
    def prompt_lengths(self) -> Tensor:
        """[R] int64: cached keys of each slot's prompt, 0 where idle."""
        return self.cached_lengths[self.prompt]

    @cached_property
    def number(self) -> Tensor:
        """[R] int64: 0 to R - 1."""
        return torch.arange(len(self.response), device=self.response.device)

    @cached_property
    def prompt_range(self) -> range:
        return range(len(self.cached_lengths) - 1) if self.prompts is None else self.prompts

    @cached_property
    def grouped(self) -> Tensor:
        """[P K] int64: the slot of each response to a prompt in prompt_range; any slot where it is in none."""
        slots = self.slot_of_response[self.prompt_range.start : self.prompt_range.stop]
        return slots.flatten().clamp_(max=len(self.response) - 1)

    @cached_property
    def place(self) -> Tensor:
        """[R] int64: where in `grouped` a slot's response is; anywhere if it is idle."""
        K = self.responses_per_prompt
        return (self.response - self.prompt_range.start * K).clamp_(max=len(self.prompt_range) * K - 1)

    @cached_property
    def slot_of_response(self) -> Tensor:
        """[P + 1, K] int64: R where a response is in no slot."""
        P, K = len(self.cached_lengths) - 1, self.responses_per_prompt
        slots = torch.full(((P + 1) * K,), len(self.response), device=self.response.device)
        slots[self.response] = self.number
        return slots.view(P + 1, K)

    @cached_property
    def members(self) -> Tensor:
        """[R, K] int32: the slots that share a prompt, listed at the first of them; -1 everywhere else."""
        group = self.slot_of_response[self.prompt]
        first = (group.amin(1) == self.number) & (self.prompt < len(self.cached_lengths) - 1)
        return torch.where(first[:, None] & (group < len(self.response)), group, -1).int()
