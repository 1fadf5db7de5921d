"""Bias and variance of each loss's gradient, against the exact one.

python -m benchmarks.frontier.gradients.measure       writes benchmarks/results/frontier/gradients.json (some minutes)
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.frontier.gradients.losses import LOSSES, Batch
from benchmarks.frontier.gradients.policy import END, Responses, all_responses, exact_gradient, moved, values

RECORD = Path(__file__).parents[2] / "results" / "frontier" / "gradients.json"
V, L, F = 4, 10, 16
SPREAD, RARE_END = 0.5, 2.0
KLS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0)
RESPONSES_PER_PROMPT = (2, 4, 16)
TASKS = 4
RESPONSES = 2**18  # of each task and setting
CHUNK = 2**13  # responses at a time


class Task:
    """A sampler, rewards of standard deviation 1, and the directions in which a policy may have moved since it sampled:
    half the gradient of the expected reward and half noise, as in training; or noise alone.
    """

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.responses = all_responses(V, L, F, generator)
        self.sampler = normal(F + 1, V) * SPREAD
        self.sampler[-1, END] -= RARE_END
        tokens, counted = self.responses.tokens, self.responses.counted
        first, second = normal(V), normal(V, V)
        rewards = first[tokens].where(counted, 0.0).sum(1)
        rewards += second[tokens[:, :-1], tokens[:, 1:]].where(counted[:, 1:], 0.0).sum(1)
        probability = self.responses.probabilities(self.sampler)
        rewards -= (probability * rewards).sum()
        self.rewards = rewards / (probability * rewards.square()).sum().sqrt()
        gradient, noise = exact_gradient(self.responses, self.sampler, self.rewards), normal(*self.sampler.shape)
        self.directions = {"trained": gradient / gradient.norm() + noise / noise.norm(), "random": noise}

    def policy(self, nats: float, direction: str = "trained") -> Tensor:
        return moved(self.responses, self.sampler, self.directions[direction], nats)


def gradients(responses: Responses, probability: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The gradient of each group by the head, [P, F, V].

    probability: [Q, V], of the policy. chosen: [P, K] int64, numbers of responses. weights: [P, K, L], derivatives of
    the loss by log-probs of tokens, 0 after a response's end.
    """
    prefixes, tokens = (each[chosen].flatten(1) for each in (responses.prefixes, responses.tokens))  # [P, K L]
    by_logit = -probability[prefixes]
    by_logit.scatter_add_(-1, tokens[..., None], torch.ones_like(by_logit[..., :1]))
    features = responses.features[prefixes] * weights.flatten(1)[..., None]
    return features.transpose(1, 2) @ by_logit


def samples(task: Task, K: int, seed: int) -> Iterator[Tensor]:
    """Numbers of responses of the sampler, [P, K]."""
    generator = torch.Generator().manual_seed(seed)
    probability = task.responses.probabilities(task.sampler)
    for _ in range(RESPONSES // CHUNK):
        drawn = torch.multinomial(probability, CHUNK, replacement=True, generator=generator)
        yield drawn.view(-1, K)


def measured(task: Task, head: Tensor, K: int, seed: int) -> dict[str, dict[str, float]]:
    """Of each loss: the cosine of its mean gradient with the exact one, and its noise over its signal, the deviation of
    one group's gradient over the length of the mean's part along the exact one.
    """
    responses = task.responses
    exact = exact_gradient(responses, head, task.rewards)
    direction, probability = exact / exact.norm(), (responses.features @ head).softmax(-1)
    ours, old = responses.token_logprobs(head), responses.token_logprobs(task.sampler)
    baseline = values(responses, task.sampler, task.rewards)[responses.prefixes]
    expected = (responses.probabilities(head) * task.rewards).sum().item()
    sums = {name: torch.zeros_like(exact) for name in LOSSES}
    squares = dict.fromkeys(LOSSES, 0.0)
    groups = 0
    for chosen in samples(task, K, seed):
        groups += len(chosen)
        for name, loss in LOSSES.items():
            token_logprobs = ours[chosen].requires_grad_()
            counted = responses.counted[chosen]
            batch = Batch(token_logprobs, old[chosen], counted, task.rewards[chosen], baseline[chosen], expected)
            (weights,) = torch.autograd.grad(loss(batch), token_logprobs)
            weights = -weights.where(counted, 0.0)  # losses fall where rewards rise
            found = gradients(responses, probability, chosen, weights)
            sums[name] += found.sum(0)
            squares[name] += found.square().sum().item()
    results = {}
    for name, total in sums.items():
        mean = total / groups
        variance = (squares[name] / groups - mean.square().sum().item()) * groups / (groups - 1)
        # The mean over so many groups is still a little noisy, which lowers its cosine.
        length = max(mean.square().sum().item() - variance / groups, 0.0) ** 0.5
        signal = (mean * direction).sum().item()
        cosine = max(-1.0, min(1.0, signal / length)) if length else 0.0
        results[name] = {"cosine": cosine, "noise": max(variance, 0.0) ** 0.5 / abs(signal)}
    return results


def main() -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    settings = product(range(TASKS), ("trained", "random"), RESPONSES_PER_PROMPT, KLS)
    for seed, direction, K, nats in tqdm([each for each in settings if each[1] == "trained" or each[3]]):
        task = Task(seed)
        for name, numbers in measured(task, task.policy(nats, direction), K, seed=1000 + seed).items():
            rows.append({"task": seed, "moved": direction, "K": K, "kl": nats, "loss": name, **numbers})
    RECORD.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
