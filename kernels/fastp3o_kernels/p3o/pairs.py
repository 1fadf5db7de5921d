"""What is known of the responses to P prompts beside the policy's log-probs, and its validation.

N tokens, P prompts with K responses each: sequence K p + k is response k of prompt p.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastp3o_kernels.checks import check_cu_seqlens, check_floating, check_shape, first_index, may_look_at_values
from fastp3o_kernels.p3o.settings import P3OSettings


@dataclass(frozen=True, eq=False)
class PairInputs:
    """The inputs that all losses share. Losses make them by `checked`."""

    cu_seqlens: Tensor  # [P K + 1], into [N]
    old_logprobs: Tensor  # [P, K]
    ref_logprobs: Tensor  # [P, K]
    rewards: Tensor  # [P, K]
    old_token_logprobs: Tensor | None  # [N], where single tokens are clipped
    averaged_prompts: int  # that the loss is a mean over: P, or more for a part of them

    @classmethod
    def checked(
        cls,
        tokens: int,
        cu_seqlens: Tensor,
        old_logprobs: Tensor,
        ref_logprobs: Tensor,
        rewards: Tensor,
        old_token_logprobs: Tensor | None,
        settings: P3OSettings,
        *,
        on_policy: bool = False,
    ) -> "PairInputs":
        """Raises ValueError for shapes and dtypes that disagree with each other or with the number of tokens, and for
        NaN (on a GPU only with FASTP3O_DEBUG=1).
        """
        K = check_responses(old_logprobs)
        check_cu_seqlens(cu_seqlens, tokens, responses_per_prompt=K)
        P = (len(cu_seqlens) - 1) // K
        check_pairs(P, K, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, rewards=rewards)
        # On-policy every token is where it was: none is clipped, and nothing needs to be known of it.
        if not (on_policy and old_token_logprobs is None):
            check_old_token_logprobs(settings.clipping, old_token_logprobs, tokens)
        # Constants, even where they require gradients.
        known = (old_logprobs.detach(), ref_logprobs.detach(), rewards.detach())
        old = None if old_token_logprobs is None else old_token_logprobs.detach()
        return cls(cu_seqlens, *known, old, averaged_prompts=P)

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

    def part(self, prompts: slice) -> "PairInputs":
        """Of some neighbouring prompts; offsets stay those in [N]."""
        K = self.responses_per_prompt
        return replace(
            self,
            cu_seqlens=self.cu_seqlens[K * prompts.start : K * prompts.stop + 1],
            old_logprobs=self.old_logprobs[prompts],
            ref_logprobs=self.ref_logprobs[prompts],
            rewards=self.rewards[prompts],
        )

    def on_policy(self, tokens: int, dtype: torch.dtype) -> tuple[Tensor, "PairInputs"]:
        """Token log-probs [N] that add up, exactly, to old_logprobs, and the pairs with them as the old ones."""
        logprobs = on_first_tokens(self.old_logprobs.to(dtype), self.cu_seqlens, tokens)
        return logprobs, replace(self, old_token_logprobs=logprobs)


def on_first_tokens(logprobs: Tensor, cu_seqlens: Tensor, N: int) -> Tensor:
    """Values of sequences -> [N], each on its sequence's first token, 0 elsewhere."""
    return logprobs.new_zeros(N).index_put_((cu_seqlens[:-1].long(),), logprobs.flatten())


def check_responses(old_logprobs: Tensor) -> int:
    """Returns K, the number of responses to a prompt."""
    if old_logprobs.dim() != 2 or old_logprobs.shape[1] < 2:
        raise ValueError(
            "old_logprobs must have shape [P, K], with K of 2 or more for the responses to a prompt, got "
            f"{list(old_logprobs.shape)}"
        )
    return old_logprobs.shape[1]


def check_pairs(P: int, K: int, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        check_shape(name, tensor, (P, K), "a row for each prompt")
        check_floating(name, tensor)
        if may_look_at_values(tensor) and (bad := tensor.isnan()).any():
            prompt, response = first_index(bad)
            raise ValueError(f"{name}[{prompt}, {response}] is NaN: response {response + 1} of prompt {prompt}")


def check_old_token_logprobs(clipping: str, old_token_logprobs: Tensor | None, tokens: int) -> None:
    if clipping != "token":
        if old_token_logprobs is not None:
            raise ValueError(f'old_token_logprobs is for clipping="token" only, and clipping is "{clipping}"')
        return
    if old_token_logprobs is None:
        raise ValueError('clipping="token" needs old_token_logprobs, the old log-probability of each token')
    check_shape("old_token_logprobs", old_token_logprobs, (tokens,), "one for each token")
    check_floating("old_token_logprobs", old_token_logprobs)
