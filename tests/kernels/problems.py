"""Random responses and heads for the tests, and P3O written a second time from the paper, one pair
at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from fastp3o_kernels import Head, VocabularyShard
from fastp3o_kernels.head import backward, forward, one_pass
from fastp3o_kernels.head import eager as head_eager
from fastp3o_kernels.head import head as head_module
from fastp3o_kernels.head.head import HeadDtypes

CLIPPINGS = ("joint", "separate", "none", "token")
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# Implementations within a memory budget: with PyTorch on the CPU or Triton on a GPU, and with
# Triton.
CHUNKED = [None, "triton"]
HALVES = (torch.float16, torch.bfloat16)
# Half precision is multiplied as on a GPU; on a CPU also as with products of bf16 and without.
ARITHMETICS = ["gpu"] if CUDA else ["gpu", "bf16", "widened"]
# A GPU compiles its kernels for every vocabulary, which takes most of a test's time.
EXAMPLES = 12 if CUDA else 25


def vocabularies(least: int, most: int) -> st.SearchStrategy[int]:
    return st.sampled_from([least, 33, most]) if CUDA else st.integers(least, most)


def budget_for(tokens: int, V: int) -> int:
    """Bytes that hold this many rows of fp32 logits and of their fp32 gradient."""
    return tokens * 8 * (-(-V // 16) * 16)


def ragged_groups() -> st.SearchStrategy[tuple[int, list[int]]]:
    """K and the lengths of the responses to up to 4 prompts, some of them 0; half the time K is 2."""

    def groups_per_prompt(K: int) -> st.SearchStrategy[tuple[int, list[int]]]:
        group = st.lists(st.integers(0, 12), min_size=K, max_size=K)
        return st.tuples(
            st.just(K), st.lists(group, max_size=4).map(lambda groups: list(chain(*groups)))
        )

    return st.sampled_from([2, 2, 3, 4]).flatmap(groups_per_prompt)


@dataclass
class Pairs:
    """Logits of the responses' tokens and what the losses know of them."""

    logits: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    rewards: Tensor
    old_token_logprobs: Tensor
    valid_responses: Tensor | None = None
    sampler_logprobs: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Pairs":
        """The same values in another precision; offsets and labels stay."""
        tensors = {name: value for name, value in vars(self).items() if value is not None}
        return replace(
            self, **{name: t.to(dtype) for name, t in tensors.items() if t.is_floating_point()}
        )


def random_pairs(
    lengths: list[int],
    vocabulary: int,
    device,
    *,
    K=2,
    scale=2.0,
    moved=0.3,
    seed=0,
    logits=None,
    masked=False,
    apart=None,
) -> Pairs:
    """K responses to each prompt, of a policy with these logits or random ones that moved by about
    `moved` nats each since the rollout. masked: a fourth of them is not valid, and nothing is known
    of these. apart: log-probs of what sampled differ from the old ones by about this many nats;
    None: they are not known.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    N, P = sum(lengths), len(lengths) // K
    logits = scale * randn(N, vocabulary) if logits is None else logits.detach().float().cpu()
    labels = torch.randint(vocabulary, (N,), generator=generator)
    token_logprobs = logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    sums = torch.stack([part.sum() for part in token_logprobs.split(lengths)] or [randn(0).sum()])[
        : P * K
    ].view(P, K)
    pairs = Pairs(
        logits=logits,
        labels=labels,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
        old_logprobs=(sums + moved * randn(P, K)).clamp(max=0),
        ref_logprobs=(sums + randn(P, K)).clamp(max=0),
        rewards=randn(P, K),
        old_token_logprobs=token_logprobs + moved * randn(N),
    )
    if apart is not None:
        pairs.sampler_logprobs = pairs.old_logprobs + apart * randn(P, K)
    if masked:
        pairs.valid_responses = torch.rand(P, K, generator=generator) > 0.25
        for known in (
            pairs.old_logprobs,
            pairs.ref_logprobs,
            pairs.rewards,
            pairs.sampler_logprobs,
        ):
            if known is not None:
                known[~pairs.valid_responses] = float("nan")
    return Pairs(**{name: None if t is None else t.to(device) for name, t in vars(pairs).items()})


@dataclass
class HiddenStates:
    """Hidden states and the tensors and settings of a head."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    temperature: float = 1.0
    shard: VocabularyShard | None = None

    @property
    def head(self) -> Head:
        return Head(**{name: value for name, value in vars(self).items() if name != "hidden"})

    def to(self, dtype: torch.dtype) -> "HiddenStates":
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), bias=bias)

    def leaves(self, hidden=True, weight=True, bias=True) -> "HiddenStates":
        """The same values, apart, with gradients for those named."""

        def leaf(tensor, needed):
            return None if tensor is None else tensor.detach().clone().requires_grad_(needed)

        return replace(
            self,
            hidden=leaf(self.hidden, hidden),
            weight=leaf(self.weight, weight),
            bias=leaf(self.bias, bias),
        )

    def logits(self) -> Tensor:
        """The log-probs by the formula, in the tensors' own dtype."""
        logits = self.hidden @ self.weight.T
        if self.bias is not None:
            logits = logits + self.bias
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature

    def gradients(self) -> list[Tensor]:
        leaves = (self.hidden, self.weight, self.bias)
        return [leaf.grad for leaf in leaves if leaf is not None and leaf.requires_grad]


def random_hidden_states(
    N: int,
    V: int,
    D: int,
    device: torch.device,
    dtype=torch.float32,
    *,
    scale=2.0,
    seed=0,
    bias=False,
    **settings,
) -> HiddenStates:
    """Random states with a head whose logits are of size `scale`."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    weight = scale * randn(V, D) / D**0.5
    states = HiddenStates(randn(N, D), weight, randn(V) if bias else None, **settings)
    on_device = {
        name: value.to(device) for name, value in vars(states).items() if isinstance(value, Tensor)
    }
    return replace(states, **on_device).to(dtype)


@contextmanager
def multiplied_as(arithmetic: str, dtype: torch.dtype) -> Iterator[None]:
    """The head works on this processor as on one with products of bf16, one without, or as on a
    GPU: products of a half-precision dtype have fp32 sums. On a GPU there is nothing to do. The
    eager head rounds gradients of logits where the chunked one must, whose products have them for
    operands; in fp16 the largest is about a thousand then.
    """
    halves = {"gpu": HALVES, "bf16": [torch.bfloat16], "widened": []}[arithmetic]

    def multiplied(a, b, out, *, accumulate=False):
        product = a.float() @ b.float()
        out.copy_(out + product if accumulate else product)

    def rounded(gradient: Tensor) -> Tensor:
        scale = 1.0
        if dtype == torch.float16 and gradient.any():
            scale = 2.0 ** (10 - torch.frexp(gradient.abs().max()).exponent.item())
        return (gradient * scale).to(dtype).to(gradient.dtype) / scale

    def products(hidden, head, rounded_to):
        logits = exact_products(hidden, head, rounded_to)
        if logits.requires_grad and dtype in halves:
            logits.register_hook(rounded)
        return logits

    exact_products = head_eager.products
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_eager, "products", products)
        patch.setattr(head_module, "multiplies", lambda half: arithmetic == "bf16")
        if DEVICE.type == "cpu" and arithmetic == "gpu" and dtype in HALVES:
            for module in (forward, backward, one_pass):
                patch.setattr(module, "multiply", multiplied)
            dtypes = HeadDtypes(dtype, dtype, dtype, torch.float32)
            patch.setattr(HeadDtypes, "for_hidden", lambda hidden: dtypes)
        yield


def oracle(
    pairs: Pairs,
    logits: Tensor,
    clipping: str,
    kl_reward="current",
    epsilon=0.2,
    cap=10.0,
    beta=0.05,
    sampler_cap=2.0,
) -> Tensor:
    """The loss by the formulas of arXiv 2310.00212, one pair after the other; autograd gives its
    gradient. Pairs are weighed by truncated ratios of the old policy to what sampled them, where
    that is known.
    """
    bounds = pairs.cu_seqlens.tolist()
    logprobs = logits.log_softmax(-1)
    P, K = pairs.rewards.shape
    losses = []
    for p, *responses in ((p, i, j) for p in range(P) for i in range(K) for j in range(i + 1, K)):
        tokens = [range(bounds[K * p + i], bounds[K * p + i + 1]) for i in responses]
        valid = pairs.valid_responses is None or pairs.valid_responses[p][responses].all()
        if not (valid and all(tokens)):
            continue
        token_logprobs = [[logprobs[t, pairs.labels[t]] for t in part] for part in tokens]
        pi = [torch.stack(part).sum() for part in token_logprobs]
        old, ref, reward = (
            x[p][responses] for x in (pairs.old_logprobs, pairs.ref_logprobs, pairs.rewards)
        )
        u = (pi[0] - ref[0]) - (pi[1] - ref[1])
        u_old = (old[0] - ref[0]) - (old[1] - ref[1])
        q = (reward[0] - reward[1] - beta * (u if kl_reward == "current" else u_old)).detach()
        rho = [(pi[i] - old[i]).exp() for i in (0, 1)]
        weight = 1.0
        if pairs.sampler_logprobs is not None:
            first, second = (old - pairs.sampler_logprobs[p][responses]).exp().tolist()
            weight = min(first * second, sampler_cap)
        if clipping == "separate":
            for i, sign in ((0, -1), (1, 1)):
                c = rho[1 - i].detach().clamp(1 / cap, cap)
                clipped = rho[i].clamp(1 - epsilon, 1 + epsilon)
                losses.append(
                    weight * torch.maximum(sign * q * c * rho[i], sign * q * c * clipped) / 2
                )
            continue
        w = -q * (rho[0] * rho[1]).detach().clamp(1 / cap, cap)
        if clipping == "token":
            for part, values, sign in zip(tokens, token_logprobs, (1, -1), strict=True):
                for t, value in zip(part, values, strict=True):
                    before = pairs.old_token_logprobs[t]
                    clipped = torch.clamp(value, before - epsilon, before + epsilon)
                    losses.append(weight * torch.maximum(sign * w * value, sign * w * clipped))
        elif clipping == "joint":
            losses.append(
                weight
                * torch.maximum(w * u, w * torch.clamp(u, u_old - epsilon, u_old + epsilon))
                / 2
            )
        else:
            losses.append(weight * w * u / 2)
    mean_over = len(logits) * (K - 1) if clipping == "token" else P * K * (K - 1) // 2
    return torch.stack([0 * logits.sum(), *losses]).sum() / max(mean_over, 1)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
