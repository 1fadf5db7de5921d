"""What is known of the responses to P prompts beside the policy's log-probs, and its validation.

N tokens, P prompts with K responses each: sequence K p + k is response k of prompt p.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fastp3o_kernels.checks import (
    check_divisor,
    check_floating,
    check_same_device,
    check_shape,
    checked_cu_seqlens,
    first_index,
    may_look_at_values,
)
from fastp3o_kernels.p3o.settings import P3OSettings
from fastp3o_kernels.rows.eager import at_least_fp32


@dataclass(frozen=True, eq=False)
class PairInputs:
    """The inputs that all losses share. Losses make them by `checked`."""

    cu_seqlens: Tensor  # [P K + 1], into [N]
    old_logprobs: Tensor  # [P, K]
    ref_logprobs: Tensor  # [P, K]
    rewards: Tensor  # [P, K]
    valid_responses: Tensor | None  # [P, K] bool
    old_token_logprobs: Tensor | None  # [N], where single tokens are clipped
    divisor: Tensor  # 0-d, of the sum over all prompts or tokens, also where these are a part of them

    @classmethod
    def checked(
        cls,
        policy_name: str,
        policy: Tensor,
        cu_seqlens: Tensor | Sequence[int],
        old_logprobs: Tensor,
        ref_logprobs: Tensor,
        rewards: Tensor,
        settings: P3OSettings,
        *,
        valid_responses: Tensor | None = None,
        old_token_logprobs: Tensor | None = None,
        divisor: float | Tensor | None = None,
        on_policy: bool = False,
    ) -> "PairInputs":
        """policy: [N, ...], what the loss has of each token, called `policy_name`. Offsets and divisor come to its
        device.

        Raises ValueError for shapes, dtypes and devices that disagree with each other or with the policy's, and for NaN
        of a response that takes part in a pair (on a GPU only with FASTP3O_DEBUG=1).
        """
        tokens, device, K = len(policy), policy.device, check_responses(old_logprobs)
        cu_seqlens = checked_cu_seqlens(cu_seqlens, tokens, responses_per_prompt=K)
        P = (len(cu_seqlens) - 1) // K
        known = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs, "rewards": rewards}
        for name, tensor in known.items():
            check_shape(name, tensor, (P, K), "a row for each prompt")
            check_floating(name, tensor)
        if valid_responses is not None:
            check_shape("valid_responses", valid_responses, (P, K), "a row for each prompt")
            if valid_responses.dtype != torch.bool:
                raise ValueError(f"valid_responses must be bool, got {valid_responses.dtype}: call .bool()")
        # On-policy every token is where it was: none is clipped, and nothing needs to be known of it.
        if not (on_policy and old_token_logprobs is None):
            check_old_token_logprobs(settings.clipping, old_token_logprobs, tokens)
        if divisor is None:
            divisor = max(tokens if settings.clipping == "token" else P, 1)
        # What is known of responses is constant, even where it requires gradients.
        pairs = cls(
            cu_seqlens.to(device, non_blocking=True),
            old_logprobs.detach(),
            ref_logprobs.detach(),
            rewards.detach(),
            valid_responses,
            None if old_token_logprobs is None else old_token_logprobs.detach(),
            number_on_device(divisor, at_least_fp32(old_logprobs[:0]).dtype, device),
        )
        check_same_device(**{policy_name: policy}, **pairs.floating, valid_responses=valid_responses)
        if may_look_at_values(policy):
            pairs.check_no_nan()
        return pairs

    @property
    def floating(self) -> dict[str, Tensor]:
        """The tensors whose device and dtype decide the implementation, by name."""
        named = {"old_logprobs": self.old_logprobs, "ref_logprobs": self.ref_logprobs, "rewards": self.rewards}
        if self.old_token_logprobs is not None:
            named["old_token_logprobs"] = self.old_token_logprobs
        return named

    @property
    def responses_per_prompt(self) -> int:
        return self.rewards.shape[1]

    @property
    def pairs_per_prompt(self) -> int:
        K = self.responses_per_prompt
        return K * (K - 1) // 2

    @cached_property
    def in_pairs(self) -> Tensor:
        """[P, K] bool: which responses take part in a pair: valid, with tokens, as is another one to the prompt."""
        counts = (self.cu_seqlens.diff() > 0).view(self.rewards.shape)
        if self.valid_responses is not None:
            counts = counts & self.valid_responses
        return counts & (counts.sum(dim=1, keepdim=True) > 1)

    def part(self, prompts: slice) -> "PairInputs":
        """Of some neighbouring prompts; offsets stay those in [N], and the divisor that of all."""
        K, valid = self.responses_per_prompt, self.valid_responses
        return replace(
            self,
            cu_seqlens=self.cu_seqlens[K * prompts.start : K * prompts.stop + 1],
            old_logprobs=self.old_logprobs[prompts],
            ref_logprobs=self.ref_logprobs[prompts],
            rewards=self.rewards[prompts],
            valid_responses=None if valid is None else valid[prompts],
        )

    def on_policy(self, tokens: int, dtype: torch.dtype) -> tuple[Tensor, "PairInputs"]:
        """Token log-probs [N] that add up, exactly, to old_logprobs, and the pairs with them as the old ones."""
        logprobs = on_first_tokens(self.old_logprobs.to(dtype), self.cu_seqlens, tokens)
        return logprobs, replace(self, old_token_logprobs=logprobs)

    def check_no_nan(self) -> None:
        for name in ("old_logprobs", "ref_logprobs", "rewards"):
            if (bad := getattr(self, name).isnan() & self.in_pairs).any():
                prompt, response = first_index(bad)
                raise ValueError(f"{name}[{prompt}, {response}] is NaN: response {response + 1} of prompt {prompt}")


def on_first_tokens(logprobs: Tensor, cu_seqlens: Tensor, N: int) -> Tensor:
    """Values of sequences -> [N], each on its sequence's first token, 0 elsewhere; those of empty ones nowhere."""
    tokens = logprobs.new_zeros(N)
    if N == 0:
        return tokens
    empty = cu_seqlens.diff() == 0
    first = cu_seqlens[:-1].long().clamp(max=N - 1)
    return tokens.index_add_(0, first, logprobs.flatten().masked_fill(empty, 0.0))


def number_on_device(number: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0-d, without waiting for the device."""
    check_divisor(number)
    if isinstance(number, Tensor):
        return number.detach().to(device, dtype, non_blocking=True)
    return torch.full((), number, dtype=dtype, device=device)


def check_responses(old_logprobs: Tensor) -> int:
    """Returns K, the number of responses to a prompt."""
    if old_logprobs.dim() != 2 or old_logprobs.shape[1] < 2:
        raise ValueError(
            "old_logprobs must have shape [P, K], with K of 2 or more for the responses to a prompt, got "
            f"{list(old_logprobs.shape)}"
        )
    return old_logprobs.shape[1]


def check_old_token_logprobs(clipping: str, old_token_logprobs: Tensor | None, tokens: int) -> None:
    if clipping != "token":
        if old_token_logprobs is not None:
            raise ValueError(f'old_token_logprobs is for clipping="token" only, and clipping is "{clipping}"')
        return
    if old_token_logprobs is None:
        raise ValueError('clipping="token" needs old_token_logprobs, the old log-probability of each token')
    check_shape("old_token_logprobs", old_token_logprobs, (tokens,), "one for each token")
    check_floating("old_token_logprobs", old_token_logprobs)
