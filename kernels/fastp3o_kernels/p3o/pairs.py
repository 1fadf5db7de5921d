"""The inputs that P3O's losses share, and their validation.

N tokens, P prompts with K responses each: sequence K p + k is response k of prompt p.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan
from typing import Any

import torch
from torch import Tensor

from fastp3o_kernels.checks import (
    check_divisor,
    check_floating,
    check_same_device,
    check_shape,
    check_tensors,
    checked_cu_seqlens,
    first_index,
    may_look_at_values,
)
from fastp3o_kernels.operation import on_device
from fastp3o_kernels.p3o.settings import P3OSettings, check_settings
from fastp3o_kernels.rows.eager import at_least_fp32

# Log-probs that were computed in half precision may be a little above 0.
LARGEST_LOGPROB = 0.1


def check_reference_and_rewards(ref_logprobs: object, rewards: object) -> None:
    """Raises ValueError for None, which other log-probs may be."""
    if ref_logprobs is None:
        raise ValueError(
            "ref_logprobs must be a tensor [P, K], got None; with kl_coef 0 give zeros"
        )
    if rewards is None:
        raise ValueError("rewards must be a tensor [P, K] or [P, K, K], got None")


@dataclass(frozen=True, eq=False)
class Pairs:
    """A loss's inputs from the responses to P prompts, except the policy's log-probs. Losses use
    those of `checked`.
    """

    cu_seqlens: Tensor  # [P K + 1], into [N]
    old_logprobs: Tensor | None  # [P, K]; None: the policy's own
    ref_logprobs: Tensor  # [P, K]
    rewards: Tensor  # [P, K]; or [P, K, K], the difference of each pair, of which i < j is read
    # [N], where single tokens are clipped; None: the policy's own.
    old_token_logprobs: Tensor | None = None
    valid_responses: Tensor | None = None  # [P, K] bool
    sampler_logprobs: Tensor | None = None  # [P, K]; None: pairs have no importance weights
    # Of the sum over all prompts or tokens, also where these are a part of them; once checked 0-d
    # on the device.
    divisor: Any = None

    def checked(self, policy_name: str, policy: Tensor, settings: P3OSettings) -> "Pairs":
        """The same as constants, even where they require gradients, with offsets and divisor on the
        policy's device.

        policy: [N, ...], what the loss has of each token, called `policy_name`.

        Raises ValueError for shapes, dtypes and devices that disagree with each other or with the
        policy's, and, on a GPU only with FASTP3O_DEBUG=1, for NaN or an infinity of a response that
        takes part in a pair, and as `check_signs` does.
        """
        check_settings(settings)
        check_reference_and_rewards(self.ref_logprobs, self.rewards)
        check_tensors(**{name: value for name, value in vars(self).items() if name != "divisor"})
        tokens, device, rewards, divisor = len(policy), policy.device, self.rewards, self.divisor
        if (
            rewards.dim() not in (2, 3)
            or rewards.shape[1] < 2
            or rewards.shape[1] != rewards.shape[-1]
        ):
            raise ValueError(
                "rewards must have shape [P, K], with K of 2 or more for the responses to a prompt, or [P, K, K] for "
                f"the differences of their pairs, got {list(rewards.shape)}"
            )
        K = rewards.shape[1]
        cu_seqlens = checked_cu_seqlens(self.cu_seqlens, policy, responses_per_prompt=K)
        P = (len(cu_seqlens) - 1) // K
        given = f"rewards are {list(rewards.shape)} and cu_seqlens has {P * K} responses"
        for name, tensor in self.floating.items():
            by_token = name == "old_token_logprobs"
            if by_token and settings.clipping != "token":
                raise ValueError(
                    f'{name} is for clipping="token" only, and clipping is "{settings.clipping}"'
                )
            by_response = (P, K, K) if name == "rewards" and self.compares_pairs else (P, K)
            if by_token:
                check_shape(name, tensor, (tokens,), "one for each token")
            else:
                check_shape(name, tensor, by_response, f"[P, K], where {given}")
            check_floating(name, tensor)
        if self.valid_responses is not None:
            check_shape("valid_responses", self.valid_responses, (P, K), "a row for each prompt")
            if self.valid_responses.dtype != torch.bool:
                raise ValueError(
                    f"valid_responses must be bool, got {self.valid_responses.dtype}: call .bool()"
                )
        if settings.clipping == "token" and (self.old_logprobs is None) != (
            self.old_token_logprobs is None
        ):
            raise ValueError(
                'clipping="token" needs old_token_logprobs, the old log-probability of each token, next to '
                "old_logprobs; both are None where the old policy is this one"
            )
        if divisor is None:
            divisor = max(tokens if settings.clipping == "token" else P, 1)
        check_divisor(divisor)
        dtype = at_least_fp32(rewards[:0]).dtype
        if not isinstance(divisor, Tensor):
            divisor = torch.full((), float(divisor), dtype=dtype, device=device)
        pairs = replace(
            self,
            cu_seqlens=on_device(cu_seqlens, device),
            divisor=on_device(divisor.detach(), device, dtype),
            **{name: tensor.detach() for name, tensor in self.floating.items()},
        )
        check_same_device(
            **{policy_name: policy}, **pairs.floating, valid_responses=self.valid_responses
        )
        for name, tensor in pairs.floating.items() if may_look_at_values(policy) else ():
            # A reference that rules a response out makes the loss infinite, which a trainer sees
            # and survives.
            wrong = tensor.isnan() if name == "ref_logprobs" else ~tensor.isfinite()
            if tensor.dim() == 3:  # a response counts with its pairs
                wrong = (wrong & pairs.in_pairs[:, None, :]).any(dim=2)
            if tensor.dim() > 1 and (bad := wrong & pairs.in_pairs).any():
                prompt, response = first_index(bad)
                of_response = tensor[prompt, response].flatten()
                value = float(of_response[of_response.isfinite().logical_not()][0])
                raise ValueError(
                    f"{name}[{prompt}, {response}] is {'NaN' if isnan(value) else value}: response {response + 1} of "
                    f"prompt {prompt}"
                )
        if may_look_at_values(policy):
            pairs.check_signs()
        return pairs

    def check_signs(self) -> None:
        """Raises ValueError for old or reference log-probs above 0 of responses that take part in a
        pair, and for differences of pairs that are neither −1 times those of the opposite pairs
        nor 0 in their place.
        """
        for name in ("old_logprobs", "ref_logprobs"):
            logprobs = getattr(self, name)
            if logprobs is None:
                continue
            wrong = (logprobs > LARGEST_LOGPROB) & self.in_pairs
            if wrong.any():
                prompt, response = first_index(wrong)
                raise ValueError(
                    f"{name}[{prompt}, {response}] is {float(logprobs[prompt, response]):.4g}, and "
                    "log-probabilities are not above 0: their order is old_logprobs, ref_logprobs, "
                    "rewards"
                )
        if self.compares_pairs:
            below, mirrored = self.rewards.tril(-1), self.rewards.mT
            unlike = (below != 0) & ~torch.isclose(below, -mirrored, rtol=1e-3, atol=1e-6)
            wrong = unlike & self.in_pairs[:, :, None] & self.in_pairs[:, None, :]
            if wrong.any():
                prompt, i, j = first_index(wrong)
                raise ValueError(
                    f"rewards[{prompt}, {j}, {i}] is {float(mirrored[prompt, i, j]):.4g} and "
                    f"rewards[{prompt}, {i}, {j}] {float(below[prompt, i, j]):.4g}: the difference "
                    "of a pair must be −1 times that of the opposite one; for probabilities p of a "
                    "preference give 2 p − 1 or their logits"
                )

    @property
    def floating(self) -> dict[str, Tensor]:
        """The tensors whose device and dtype decide the implementation, by name."""
        names = (
            "old_logprobs",
            "ref_logprobs",
            "rewards",
            "old_token_logprobs",
            "sampler_logprobs",
        )
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    @property
    def compares_pairs(self) -> bool:
        """Whether rewards are the differences of pairs, which need not be those of any scores."""
        return self.rewards.dim() == 3

    @property
    def reward_differences(self) -> Tensor:
        """[P K (K − 1) / 2]: r_i − r_j of all i < j."""
        K = self.rewards.shape[1]
        first, second = torch.triu_indices(K, K, offset=1, device=self.rewards.device)
        rewards = at_least_fp32(self.rewards)
        values = (
            rewards[:, first, second]
            if self.compares_pairs
            else rewards[:, first] - rewards[:, second]
        )
        return values.flatten()

    @property
    def pairs_per_prompt(self) -> int:
        K = self.rewards.shape[1]
        return K * (K - 1) // 2

    @cached_property
    def in_pairs(self) -> Tensor:
        """[P, K] bool: which responses take part in a pair: valid, with tokens, as is another one
        to the prompt.
        """
        counts = (self.cu_seqlens.diff() > 0).view(self.rewards.shape[:2])
        if self.valid_responses is not None:
            counts = counts & self.valid_responses
        return counts & (counts.sum(dim=1, keepdim=True) > 1)

    def part(self, prompts: slice) -> "Pairs":
        """The inputs of neighboring prompts; offsets stay those in [N], and the divisor that of
        all.
        """
        K = self.rewards.shape[1]
        names = ("old_logprobs", "ref_logprobs", "rewards", "valid_responses", "sampler_logprobs")
        rows = {
            name: tensor[prompts] for name in names if (tensor := getattr(self, name)) is not None
        }
        return replace(
            self, cu_seqlens=self.cu_seqlens[K * prompts.start : K * prompts.stop + 1], **rows
        )
