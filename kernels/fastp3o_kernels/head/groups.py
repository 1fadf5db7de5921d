"""What an objective sees: neighbouring groups of responses, whole.

P groups with K responses each (a prompt's responses; a chosen and a rejected; one response), n tokens of all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fastp3o_kernels.checks import check_same_device
from fastp3o_kernels.rows import eager


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
        return eager.sequence_logprobs(values, self.cu_seqlens).view(-1, self.responses_per_group)

    def means(self, values: Tensor) -> Tensor:
        """[n] -> [P, K]; 0 for a response without tokens."""
        return self.sums(values) / self.lengths.clamp(min=1)

    def of_tokens(self, values: Tensor) -> Tensor:
        """[P, K] -> [n]: of each token's response."""
        return values.flatten().repeat_interleave(self.lengths.flatten(), output_size=len(self.token_logprobs))


@dataclass(frozen=True, eq=False)
class GroupTensors:
    """The caller's tensors, each with its place: of tokens [N, ...], of responses [P, K, ...] or of groups [P, ...].

    All are constants: gradients do not reach them.
    """

    of_tokens: Mapping[str, Tensor]
    of_responses: Mapping[str, Tensor]
    of_groups: Mapping[str, Tensor]

    @classmethod
    def checked(
        cls,
        N: int,
        P: int,
        K: int,
        of_tokens: Mapping[str, Tensor] | None,
        of_responses: Mapping[str, Tensor] | None,
        of_groups: Mapping[str, Tensor] | None,
        *,
        hidden: Tensor,
    ) -> "GroupTensors":
        """Raises ValueError for a tensor of another shape or on another device than `hidden`, and for a name given
        twice.
        """
        places = (
            ("a row for each token", (N,), of_tokens or {}),
            ("a row for each group and an entry for each response", (P, K), of_responses or {}),
            ("a row for each group", (P,), of_groups or {}),
        )
        seen: set[str] = set()
        for why, shape, tensors in places:
            for name, tensor in tensors.items():
                if name in seen:
                    raise ValueError(f"{name} is given twice")
                seen.add(name)
                if tensor.shape[: len(shape)] != shape:
                    raise ValueError(f"{name} must begin with {list(shape)} ({why}), got {list(tensor.shape)}")
                check_same_device(hidden=hidden, **{name: tensor})
        detached = ({name: tensor.detach() for name, tensor in tensors.items()} for _, _, tensors in places)
        return cls(*detached)

    def part(self, groups: slice, tokens: slice) -> dict[str, Tensor]:
        """Of some neighbouring groups, whose tokens these are."""
        cut = {name: tensor[tokens] for name, tensor in self.of_tokens.items()}
        whole = self.of_responses | self.of_groups  # type: ignore[operator]
        return cut | {name: tensor[groups] for name, tensor in whole.items()}
