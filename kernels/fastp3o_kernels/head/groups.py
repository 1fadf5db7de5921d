"""An objective's view: whole groups of responses that are neighbours.

P groups with K responses each (a prompt's responses; a chosen and a rejected; one response), n tokens of all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from fastp3o_kernels.checks import check_same_device
from fastp3o_kernels.rows.oracle import sequence_logprobs


@dataclass(frozen=True, eq=False)
class Groups:
    """Token log-probs, differentiable, and the caller's tensors of the same groups.

    token_logprobs: [n] fp32 or fp64. cu_seqlens: [P K + 1] int64, where each response begins in [n].
    entropy, mean_logit, is_top: [n], where they were asked for; the first is differentiable (`TokenOutputs`).
    """

    token_logprobs: Tensor
    cu_seqlens: Tensor
    responses_per_group: int
    tensors: Mapping[str, Tensor]
    entropy: Tensor | None = None
    mean_logit: Tensor | None = None
    is_top: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        """One of the caller's tensors: [n, ...], [P, K, ...] or [P, ...], as it was given."""
        return self.tensors[name]

    @cached_property
    def lengths(self) -> Tensor:
        """[P, K] int64: tokens of each response."""
        return self.cu_seqlens.diff().view(-1, self.responses_per_group)

    @cached_property
    def logprobs(self) -> Tensor:
        """[P, K]: log-probabilities of whole responses."""
        return self.sums(self.token_logprobs)

    def sums(self, values: Tensor) -> Tensor:
        """[n] -> [P, K], over the tokens of each response."""
        return sequence_logprobs(values, self.cu_seqlens).view(-1, self.responses_per_group)

    def means(self, values: Tensor) -> Tensor:
        """[n] -> [P, K]; 0 for a response without tokens."""
        return self.sums(values) / self.lengths.clamp(min=1)

    def per_token(self, values: Tensor) -> Tensor:
        """[P, K] -> [n]: each token gets its response's value."""
        return values.flatten().repeat_interleave(self.lengths.flatten(), output_size=len(self.token_logprobs))


class GroupTensors(NamedTuple):
    """The caller's tensors by name: of tokens [N, ...], of responses [P, K, ...] and of groups [P, ...]; constants."""

    token_tensors: dict[str, Tensor]
    response_tensors: dict[str, Tensor]
    group_tensors: dict[str, Tensor]

    @classmethod
    def checked(cls, hidden: Tensor, P: int, K: int, *tensors: Mapping[str, Tensor]) -> "GroupTensors":
        """tensors: of tokens, responses and groups. hidden: [N, D].

        Raises ValueError for a tensor of another shape or on another device than `hidden`, and for a name given twice.
        """
        shapes = (len(hidden),), (P, K), (P,)
        reasons = "a row for each token", "a row for each group and an entry for each response", "a row for each group"
        seen: set[str] = set()
        for named, shape, why in zip(tensors, shapes, reasons, strict=True):
            for name, tensor in named.items():
                if name in seen:
                    raise ValueError(f"{name} is given twice")
                seen.add(name)
                if tensor.shape[: len(shape)] != shape:
                    raise ValueError(f"{name} must begin with {list(shape)} ({why}), got {list(tensor.shape)}")
                check_same_device(hidden=hidden, **{name: tensor})
        return cls(*({name: tensor.detach() for name, tensor in named.items()} for named in tensors))

    def part(self, groups: slice, tokens: slice) -> dict[str, Tensor]:
        """The tensors of neighbouring groups, whose tokens are `tokens`."""
        whole = self.response_tensors | self.group_tensors
        return {name: tensor[tokens] for name, tensor in self.token_tensors.items()} | {
            name: tensor[groups] for name, tensor in whole.items()
        }
