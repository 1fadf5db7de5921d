"""Random hidden states, heads and pairs of responses.

N tokens, D hidden size, V vocabulary, P pairs of responses of `RESPONSE_TOKENS`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.shapes import DEVICE, DTYPE, RESPONSE_TOKENS, HeadSizes
from fastp3o_kernels import linear_logprobs, sequence_logprobs

LOGITS_STD = 4.0


@dataclass
class Inputs:
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    labels: Tensor  # [N]
    cu_seqlens: Tensor  # [2P + 1] on the device
    # the same on the CPU, where the head reads them: it would wait for the device's
    host_cu_seqlens: Tensor
    sums: Tensor  # [P, 2], the policy's own log-probs
    old_logprobs: Tensor  # [P, 2]
    ref_logprobs: Tensor  # [P, 2]
    rewards: Tensor  # [P, 2]

    @property
    def pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.old_logprobs, self.ref_logprobs, self.rewards

    def trained(self) -> "Inputs":
        """With fresh leaves."""
        self.hidden, self.weight = (
            tensor.detach().requires_grad_() for tensor in (self.hidden, self.weight)
        )
        return self

    def for_policy(self, sums: Tensor) -> "Inputs":
        """The same moves since the rollout, for a policy of other log-probs [P, 2]."""
        shift = sums - self.sums
        return replace(
            self,
            sums=sums,
            old_logprobs=self.old_logprobs + shift,
            ref_logprobs=self.ref_logprobs + shift,
        )

    def a_third_clipped(self) -> "Inputs":
        """Every third pair moved past the clip range the way its rewards want it to: its gradient
        is zero.
        """
        old = self.old_logprobs.clone()
        wanted = torch.sign(self.rewards[::3, :1] - self.rewards[::3, 1:])
        old[::3] = self.sums[::3] - wanted * old.new_tensor([0.5, -0.5])
        return replace(self, old_logprobs=old)

    def in_fp64(self) -> "Inputs":
        floating = {name: value for name, value in vars(self).items() if value.is_floating_point()}
        return replace(self, **{name: value.double() for name, value in floating.items()})


def random_inputs(
    head: HeadSizes, tokens: int, dtype: torch.dtype | None = None, *, ragged: bool = False
) -> Inputs:
    """Pairs that moved since the rollout, but within the clip range: all of them have a gradient.

    dtype: DTYPE if None. ragged: lengths of responses are random, with the same mean.
    """
    generator, dtype = torch.Generator(DEVICE).manual_seed(0), dtype or DTYPE

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    hidden = randn(tokens, head.hidden).to(dtype)
    weight = (randn(head.vocabulary, head.hidden) * (LOGITS_STD / head.hidden**0.5)).to(dtype)
    labels = torch.randint(head.vocabulary, (tokens,), generator=generator, device=DEVICE)
    host_cu_seqlens = torch.arange(0, tokens + 1, RESPONSE_TOKENS, dtype=torch.int32)
    if ragged:
        cuts = torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(0))[
            : len(host_cu_seqlens) - 2
        ]
        host_cu_seqlens[1:-1] = cuts.sort().values + 1
    cu_seqlens = host_cu_seqlens.to(DEVICE)
    with torch.no_grad():
        sums = sequence_logprobs(linear_logprobs(hidden, weight, labels), cu_seqlens).view(-1, 2)
    pairs = len(sums)
    return Inputs(
        hidden=hidden,
        weight=weight,
        labels=labels,
        cu_seqlens=cu_seqlens,
        host_cu_seqlens=host_cu_seqlens,
        sums=sums,
        old_logprobs=sums + 0.02 * randn(pairs, 2),
        ref_logprobs=sums + randn(pairs, 2),
        rewards=randn(pairs, 2),
    )
