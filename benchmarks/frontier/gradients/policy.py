"""An autoregressive policy that is small enough to enumerate all of its responses: a trained head on fixed features.

V tokens, the first of which ends a response; at most L tokens; S responses; Q prefixes with F features each. The policy
is its head [F, V]; all is in fp64. Features are the states of a recurrent network with random weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

END = 0


@dataclass(frozen=True)
class Responses:
    """All responses. tokens: [S, L] int64. prefixes: [S, L] int64, the number of the prefix before each token. counted:
    [S, L] bool, False after a response's end. features: [Q, F].
    """

    tokens: Tensor
    prefixes: Tensor
    counted: Tensor
    features: Tensor

    def token_logprobs(self, head: Tensor) -> Tensor:
        """log π of each token, [S, L], 0 after the end."""
        logprobs = (self.features @ head).log_softmax(-1)[self.prefixes, self.tokens]
        return logprobs.where(self.counted, 0.0)

    def probabilities(self, head: Tensor) -> Tensor:
        """π of each response, [S]."""
        return self.token_logprobs(head).sum(1).exp()


def all_responses(V: int, L: int, F: int, generator: torch.Generator) -> Responses:
    """Every sequence of at most L tokens that ends with END or has L tokens."""
    inputs, recurrence = (torch.randn(rows, F, generator=generator, dtype=torch.float64) for rows in (V, F))
    waiting: list[tuple[tuple[int, ...], tuple[int, ...], Tensor]] = [((), (), torch.zeros(F, dtype=torch.float64))]
    tokens, prefixes, counted, features = [], [], [], []
    while waiting:
        before, numbers, state = waiting.pop()
        numbers = (*numbers, len(features))
        features.append(state)
        for token in range(V):
            now = (*before, token)
            if token != END and len(now) < L:
                waiting.append((now, numbers, torch.tanh(inputs[token] + state @ recurrence / F**0.5)))
                continue
            padding = [0] * (L - len(now))
            tokens.append([*now, *padding])
            prefixes.append([*numbers, *padding])
            counted.append([True] * len(now) + [False] * len(padding))
    constant = torch.ones(len(features), 1, dtype=torch.float64)
    with_bias = torch.cat([torch.stack(features), constant], 1)
    return Responses(torch.tensor(tokens), torch.tensor(prefixes), torch.tensor(counted), with_bias)


def kl(responses: Responses, head: Tensor, other: Tensor) -> float:
    """KL(π ‖ π_other) of whole responses, in nats."""
    ours, theirs = (responses.token_logprobs(each).sum(1) for each in (head, other))
    return (ours.exp() * (ours - theirs)).sum().item()


def values(responses: Responses, head: Tensor, rewards: Tensor) -> Tensor:
    """The expected reward after each prefix, [Q]. rewards: [S]."""
    probability = responses.probabilities(head)
    number = len(responses.features)
    flat = responses.prefixes[responses.counted]
    repeats = responses.counted.sum(1)
    mass = torch.zeros(number, dtype=head.dtype).index_add(0, flat, probability.repeat_interleave(repeats))
    total = torch.zeros_like(mass).index_add(0, flat, (probability * rewards).repeat_interleave(repeats))
    return total / mass


def exact_gradient(responses: Responses, head: Tensor, rewards: Tensor) -> Tensor:
    """The gradient of the expected reward, [F, V]."""
    head = head.detach().requires_grad_()
    return torch.autograd.grad((responses.probabilities(head) * rewards).sum(), head)[0]


def moved(responses: Responses, start: Tensor, direction: Tensor, nats: float) -> Tensor:
    """The head that is moved from a start along a direction until the KL to it is `nats`."""
    if not nats:
        return start.clone()
    low, high = 0.0, 1.0
    while kl(responses, start + high * direction, start) < nats:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if kl(responses, start + middle * direction, start) < nats else (low, middle)
    return start + high * direction
