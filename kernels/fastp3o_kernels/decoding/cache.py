"""The state of decoding: cached keys and values, and what each slot works on.

Each of R slots decodes one token a step, and works on one response after another. P prompts, K
responses to each; response k to prompt p has the number p K + k. Hkv heads of keys, D the size of a
head, Lp and Lr the cache's room for tokens of a prompt and of a response.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fastp3o_kernels.operation import HAS_TRITON, use_triton

if HAS_TRITON:
    from fastp3o_kernels.decoding.slots_kernel import launch_members


@dataclass
class LayerCache:
    """Keys and values of one layer, contiguous. Allocate it with zeros: memory that was never
    written must be finite, for its weight is 0, and 0 times NaN is NaN.
    """

    prompt_keys: Tensor  # [P, Hkv, Lp, D], of all but the prompts' last tokens; Lp may be 0
    prompt_values: Tensor
    own_keys: Tensor  # [R or more, Hkv, Lr, D], from a prompt's last token on
    own_values: Tensor


@dataclass(frozen=True)
class Slots:
    """The responses that the slots of one step work on; the same for all layers. A slot without a
    response is idle.

    response: [R] int64, p K + k; P K where idle. No response is in two slots.
    cached_lengths: [P + 1] int64, number of cached keys of each prompt; 0 at P.
    steps: [R] int64, own tokens in the cache before this step; the step's token is at position
        length + step.
    responses_per_prompt: K.
    """

    response: Tensor
    cached_lengths: Tensor
    steps: Tensor
    responses_per_prompt: int
    # Masks by window, which PyTorch adds to products. The first layer that needs a mask makes it.
    masks: dict[int | None, Tensor] = field(default_factory=dict, compare=False)

    @cached_property
    def by_kernel(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """`prompt`, `prompt_lengths` and `members` from one launch, where Triton runs."""
        if not use_triton(None, self.response, self.cached_lengths) or not len(self.response):
            return None
        return launch_members(self.response, self.cached_lengths, self.responses_per_prompt)

    @cached_property
    def prompt(self) -> Tensor:
        """[R] int64, P where idle."""
        return self.by_kernel[0] if self.by_kernel else self.response // self.responses_per_prompt

    @cached_property
    def prompt_lengths(self) -> Tensor:
        """[R] int64: cached keys of each slot's prompt, 0 where idle."""
        return self.by_kernel[1] if self.by_kernel else self.cached_lengths[self.prompt]

    @cached_property
    def number(self) -> Tensor:
        """[R] int32: 0 to R - 1."""
        return torch.arange(len(self.response), dtype=torch.int32, device=self.response.device)

    @cached_property
    def grouped(self) -> Tensor:
        """[P K] int32: the slot of each response; any slot if the response is in none."""
        return self.slot_of_response[:-1].flatten().clamp(min=0)

    @cached_property
    def place(self) -> Tensor:
        """[R] int64: index of a slot's response in `grouped`; any index if the slot is idle."""
        return self.response.clamp(
            max=(len(self.cached_lengths) - 1) * self.responses_per_prompt - 1
        )

    @cached_property
    def slot_of_response(self) -> Tensor:
        """[P + 1, K] int32: -1 if a response is in no slot. The last row is idle slots'."""
        P, K = len(self.cached_lengths) - 1, self.responses_per_prompt
        slots = torch.full(((P + 1) * K,), -1, dtype=torch.int32, device=self.response.device)
        slots[self.response] = self.number
        return slots.view(P + 1, K)

    @cached_property
    def members(self) -> Tensor:
        """[R, K] int32: the last of the slots that share a prompt lists all of them; the rest is
        -1, and an idle slot's are any.
        """
        if self.by_kernel:
            return self.by_kernel[2]
        group = self.slot_of_response[self.prompt]
        return group.masked_fill((group.amax(1) != self.number)[:, None], -1)
