"""Random ragged pairs, and P3O written a second time from the paper, in fp64 and one pair at a time."""

from dataclasses import dataclass, replace
from itertools import chain

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

CLIPPINGS = ("joint", "separate", "none", "token")
CUDA = torch.cuda.is_available()
# On a GPU every vocabulary compiles kernels of its own, which takes most of a test's time.
EXAMPLES = 12 if CUDA else 25


def vocabularies(least: int, most: int) -> st.SearchStrategy[int]:
    return st.sampled_from([least, 33, most]) if CUDA else st.integers(least, most)


def ragged_groups() -> st.SearchStrategy[tuple[int, list[int]]]:
    """K and the lengths of the responses to 1 to 4 prompts; half the time K is 2."""

    def of(K: int) -> st.SearchStrategy[tuple[int, list[int]]]:
        group = st.lists(st.integers(1, 12), min_size=K, max_size=K)
        return st.tuples(st.just(K), st.lists(group, min_size=1, max_size=4).map(lambda groups: list(chain(*groups))))

    return st.sampled_from([2, 2, 3, 4]).flatmap(of)


@dataclass
class Pairs:
    logits: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    rewards: Tensor
    old_token_logprobs: Tensor

    def to(self, dtype: torch.dtype) -> "Pairs":
        """The same values in another precision; offsets and labels stay."""
        floating = {name: value.to(dtype) for name, value in vars(self).items() if value.is_floating_point()}
        return replace(self, **floating)

    def call(self, loss, logits: Tensor, clipping: str, **settings):
        if clipping == "token":
            settings["old_token_logprobs"] = self.old_token_logprobs
        return loss(
            logits,
            self.labels,
            self.cu_seqlens,
            self.old_logprobs,
            self.ref_logprobs,
            self.rewards,
            clipping=clipping,
            **settings,
        )


def random_pairs(
    lengths: list[int], vocabulary: int, device: torch.device, *, K=2, scale=2.0, moved=0.3, seed=0, logits=None
) -> Pairs:
    """K responses to each prompt, of a policy with these logits or random ones that moved by about `moved` nats each
    since the rollout.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    N, P = sum(lengths), len(lengths) // K
    logits = scale * randn(N, vocabulary) if logits is None else logits.detach().float().cpu()
    labels = torch.randint(vocabulary, (N,), generator=generator)
    token_logprobs = logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    sums = torch.stack([part.sum() for part in token_logprobs.split(lengths)]).view(P, K)
    pairs = Pairs(
        logits=logits,
        labels=labels,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
        old_logprobs=sums + moved * randn(P, K),
        ref_logprobs=sums + randn(P, K),
        rewards=randn(P, K),
        old_token_logprobs=token_logprobs + moved * randn(N),
    )
    return Pairs(**{name: tensor.to(device) for name, tensor in vars(pairs).items()})


@dataclass
class Head:
    """Hidden states and a head whose logits are of size `scale`."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def settings(self) -> dict:
        return {"softcap": self.softcap, "temperature": self.temperature}

    def to(self, dtype: torch.dtype) -> "Head":
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), bias=bias)

    def leaves(self, hidden=True, weight=True, bias=True) -> "Head":
        """The same values, apart, with gradients for those named."""

        def leaf(tensor, needed):
            return None if tensor is None else tensor.detach().clone().requires_grad_(needed)

        return replace(
            self, hidden=leaf(self.hidden, hidden), weight=leaf(self.weight, weight), bias=leaf(self.bias, bias)
        )

    def logits(self) -> Tensor:
        """By the formula, in the tensors' own dtype."""
        logits = self.hidden @ self.weight.T
        if self.bias is not None:
            logits = logits + self.bias
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature

    def gradients(self) -> list[Tensor]:
        leaves = (self.hidden, self.weight, self.bias)
        return [leaf.grad for leaf in leaves if leaf is not None and leaf.requires_grad]


def random_head(
    N: int, V: int, D: int, device: torch.device, dtype=torch.float32, *, scale=2.0, seed=0, bias=False, **settings
) -> Head:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    head = Head(randn(N, D), scale * randn(V, D) / D**0.5, randn(V) if bias else None, **settings)
    moved = {name: value.to(device) for name, value in vars(head).items() if isinstance(value, Tensor)}
    return replace(head, **moved).to(dtype)


def oracle(
    pairs: Pairs, logits: Tensor, clipping: str, kl_reward="current", epsilon=0.2, cap=10.0, beta=0.05
) -> Tensor:
    """The loss by the formulas of arXiv 2310.00212, one pair after the other; autograd gives its gradient."""
    bounds = pairs.cu_seqlens.tolist()
    logprobs = logits.log_softmax(-1)
    P, K = pairs.rewards.shape
    losses = []
    for p, *responses in ((p, i, j) for p in range(P) for i in range(K) for j in range(i + 1, K)):
        tokens = [range(bounds[K * p + i], bounds[K * p + i + 1]) for i in responses]
        of_tokens = [[logprobs[t, pairs.labels[t]] for t in part] for part in tokens]
        pi = [torch.stack(part).sum() for part in of_tokens]
        old, ref, reward = (
            pairs.old_logprobs[p][responses],
            pairs.ref_logprobs[p][responses],
            pairs.rewards[p][responses],
        )
        u = (pi[0] - ref[0]) - (pi[1] - ref[1])
        u_old = (old[0] - ref[0]) - (old[1] - ref[1])
        q = (reward[0] - reward[1] - beta * (u if kl_reward == "current" else u_old)).detach()
        rho = [(pi[i] - old[i]).exp() for i in (0, 1)]
        if clipping == "separate":
            for i, sign in ((0, -1), (1, 1)):
                c = rho[1 - i].detach().clamp(1 / cap, cap)
                losses.append(
                    torch.maximum(sign * q * c * rho[i], sign * q * c * rho[i].clamp(1 - epsilon, 1 + epsilon)) / 2
                )
            continue
        w = -q * (rho[0] * rho[1]).detach().clamp(1 / cap, cap)
        if clipping == "token":
            for part, values, sign in zip(tokens, of_tokens, (1, -1), strict=True):
                for t, value in zip(part, values, strict=True):
                    before = pairs.old_token_logprobs[t]
                    clipped = torch.clamp(value, before - epsilon, before + epsilon)
                    losses.append(torch.maximum(sign * w * value, sign * w * clipped))
        elif clipping == "joint":
            losses.append(torch.maximum(w * u, w * torch.clamp(u, u_old - epsilon, u_old + epsilon)) / 2)
        else:
            losses.append(w * u / 2)
    mean_over = len(logits) * (K - 1) if clipping == "token" else P * K * (K - 1) // 2
    return torch.stack(losses).sum() / mean_over


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


@pytest.fixture(params=["eager", "triton"])
def impl(request: pytest.FixtureRequest) -> str:
    return request.param
