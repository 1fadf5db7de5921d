"""The inputs that P3O's losses share, and their validation.

N tokens, P prompts with K responses each: sequence K p + k is response k of prompt p.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan

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
from fastp3o_kernels.operation import on_device
from fastp3o_kernels.p3o.settings import P3OSettings
from fastp3o_kernels.rows.oracle import at_least_fp32


@dataclass(frozen=True, eq=False)
class PairInputs:
    """A loss's inputs from the responses to P prompts, except the policy's log-probs. Losses make it by `checked`."""

    cu_seqlens: Tensor  # [P K + 1], into [N]
    old_logprobs: Tensor | None  # [P, K]; None: the policy's own
    ref_logprobs: Tensor  # [P, K]
    rewards: Tensor  # [P, K]
    valid_responses: Tensor | None  # [P, K] bool
    old_token_logprobs: Tensor | None  # [N], where single tokens are clipped; None: the policy's own
    divisor: Tensor  # 0-d, of the sum over all prompts or tokens, also where these are a part of them
    sampler_logprobs: Tensor | None = None  # [P, K]; None: pairs have no importance weights

    @classmethod
    def checked(
        cls,
        policy_name: str,
        policy: Tensor,
        cu_seqlens: Tensor | Sequence[int],
        old_logprobs: Tensor | None,
        ref_logprobs: Tensor,
        rewards: Tensor,
        settings: P3OSettings,
        *,
        valid_responses: Tensor | None = None,
        old_token_logprobs: Tensor | None = None,
        sampler_logprobs: Tensor | None = None,
        divisor: float | Tensor | None = None,
    ) -> "PairInputs":
        """policy: [N, ...], what the loss has of each token, called `policy_name`. Offsets and divisor come to its
        device.

        Raises ValueError for shapes, dtypes and devices that disagree with each other or with the policy's, and for
        NaN or an infinity of a response that takes part in a pair (on a GPU only with FASTP3O_DEBUG=1).
        """
        tokens, device = len(policy), policy.device
        if rewards.dim() != 2 or rewards.shape[1] < 2:
            raise ValueError(
                "rewards must have shape [P, K], with K of 2 or more for the responses to a prompt, got "
                f"{list(rewards.shape)}"
            )
        K = rewards.shape[1]
        cu_seqlens = checked_cu_seqlens(cu_seqlens, policy, responses_per_prompt=K)
        P = (len(cu_seqlens) - 1) // K
        known = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs, "rewards": rewards}
        known["sampler_logprobs"] = sampler_logprobs
        for name, tensor in known.items():
            if tensor is not None:
                check_shape(name, tensor, (P, K), "a row for each prompt")
                check_floating(name, tensor)
        if valid_responses is not None:
            check_shape("valid_responses", valid_responses, (P, K), "a row for each prompt")
            if valid_responses.dtype != torch.bool:
                raise ValueError(f"valid_responses must be bool, got {valid_responses.dtype}: call .bool()")
        check_old_token_logprobs(settings.clipping, old_logprobs, old_token_logprobs, tokens)
        if divisor is None:
            divisor = max(tokens if settings.clipping == "token" else P, 1)
        # Constants, even where they require gradients.
        pairs = cls(
            on_device(cu_seqlens, device),
            None if old_logprobs is None else old_logprobs.detach(),
            ref_logprobs.detach(),
            rewards.detach(),
            valid_responses,
            None if old_token_logprobs is None else old_token_logprobs.detach(),
            number_on_device(divisor, at_least_fp32(rewards[:0]).dtype, device),
            None if sampler_logprobs is None else sampler_logprobs.detach(),
        )
        check_same_device(**{policy_name: policy}, **pairs.floating, valid_responses=valid_responses)
        if may_look_at_values(policy):
            pairs.check_finite()
        return pairs

    @property
    def floating(self) -> dict[str, Tensor]:
        """The tensors whose device and dtype decide the implementation, by name."""
        named = {
            "old_logprobs": self.old_logprobs,
            "ref_logprobs": self.ref_logprobs,
            "rewards": self.rewards,
            "old_token_logprobs": self.old_token_logprobs,
            "sampler_logprobs": self.sampler_logprobs,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def pairs_per_prompt(self) -> int:
        K = self.rewards.shape[1]
        return K * (K - 1) // 2

    @cached_property
    def in_pairs(self) -> Tensor:
        """[P, K] bool: which responses take part in a pair: valid, with tokens, as is another one to the prompt."""
        counts = (self.cu_seqlens.diff() > 0).view(self.rewards.shape)
        if self.valid_responses is not None:
            counts = counts & self.valid_responses
        return counts & (counts.sum(dim=1, keepdim=True) > 1)

    def part(self, prompts: slice) -> "PairInputs":
        """The inputs of neighbouring prompts; offsets stay those in [N], and the divisor that of all."""
        K, old, valid = self.rewards.shape[1], self.old_logprobs, self.valid_responses
        sampler = self.sampler_logprobs
        return replace(
            self,
            cu_seqlens=self.cu_seqlens[K * prompts.start : K * prompts.stop + 1],
            old_logprobs=None if old is None else old[prompts],
            ref_logprobs=self.ref_logprobs[prompts],
            rewards=self.rewards[prompts],
            valid_responses=None if valid is None else valid[prompts],
            sampler_logprobs=None if sampler is None else sampler[prompts],
        )

    def check_finite(self) -> None:
        for name, tensor in self.floating.items():
            # A reference that rules a response out makes the loss infinite, which a trainer sees and survives.
            wrong = tensor.isnan() if name == "ref_logprobs" else ~tensor.isfinite()
            if tensor.dim() == 2 and (bad := wrong & self.in_pairs).any():
                prompt, response = first_index(bad)
                value = float(tensor[prompt, response])
                raise ValueError(
                    f"{name}[{prompt}, {response}] is {'NaN' if isnan(value) else value}: response {response + 1} of "
                    f"prompt {prompt}"
                )


def number_on_device(number: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0-d, without waiting for the device."""
    check_divisor(number)
    if isinstance(number, Tensor):
        return on_device(number.detach(), device, dtype)
    return torch.full((), number, dtype=dtype, device=device)


def check_old_token_logprobs(clipping: str, old: Tensor | None, old_tokens: Tensor | None, tokens: int) -> None:
    """old, old_tokens: log-probs of responses and of their tokens [N], or None for the policy's own."""
    if old_tokens is not None:
        if clipping != "token":
            raise ValueError(f'old_token_logprobs is for clipping="token" only, and clipping is "{clipping}"')
        check_shape("old_token_logprobs", old_tokens, (tokens,), "one for each token")
        check_floating("old_token_logprobs", old_tokens)
    if clipping == "token" and (old is None) != (old_tokens is None):
        raise ValueError(
            'clipping="token" needs old_token_logprobs, the old log-probability of each token, next to old_logprobs; '
            "both are None where the old policy is this one"
        )
