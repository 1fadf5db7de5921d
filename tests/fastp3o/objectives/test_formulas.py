"""Each objective's loss of a packed row, and its gradient, against its formula of whole responses'
logits in fp64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastp3o.models.packed_model import PackedModel
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.packing.pack import Packing, pack

P, K, LONGEST = 3, 4, 9
NAMES = {
    "model": "m",
    "output_dir": "o",
    "prompts": "p",
    "reward": "r",
    "max_response_tokens": LONGEST,
}
CAP = 1.2  # of importance weights


@dataclass
class Response:
    """One response: its tokens' log-probs now, old policy, what sampled, the reference; entropy,
    reward, mask.
    """

    now: Tensor
    old: Tensor
    sampler: Tensor
    ref: Tensor
    entropy: Tensor
    reward: float
    counts: bool


Groups = list[list[Response]]
Formula = Callable[[Groups], Tensor]


def clip_loss(log_ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def weight(*responses: Response) -> float:
    """The importance weight of responses that are sampled together."""
    return min(math.exp(sum((y.old - y.sampler).sum().item() for y in responses)), CAP)


def token_weights(y: Response) -> Tensor:
    return (y.old - y.sampler).exp().clamp(max=CAP)


def rewards(group: list[Response], kl_coef: float = 0.0) -> list[float]:
    return [y.reward - kl_coef * (y.old - y.ref).sum().item() for y in group]


def less_mean(rewards: list[float], *, scale: bool = True) -> list[float]:
    mean = sum(rewards) / K
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (K - 1))
    return [(r - mean) / (std + 1e-4) if scale else r - mean for r in rewards]


def less_others(rewards: list[float]) -> list[float]:
    return [r - (sum(rewards) - r) / (K - 1) for r in rewards]


def of_responses(
    advantages: Callable[[list[Response]], list[float]], loss: Callable[..., Tensor]
) -> Formula:
    """The mean over responses."""
    return lambda groups: (
        sum(loss(y, a) for g in groups for y, a in zip(g, advantages(g), strict=True)) / (P * K)
    )


def grpo(y: Response, a: float) -> Tensor:
    """The mean over tokens; k3."""
    k3 = (y.ref - y.now).exp() - 1 - (y.ref - y.now)
    return (token_weights(y) * clip_loss(y.now - y.old, a, 0.2, 0.2) + 0.04 * k3).mean()


def dr_grpo(y: Response, a: float) -> Tensor:
    return clip_loss(y.now - y.old, a, 0.2, 0.2).sum() / LONGEST


def gspo(y: Response, a: float) -> Tensor:
    return weight(y) * clip_loss((y.now - y.old).mean(), a, 3e-4, 4e-4)


def vespo(y: Response, a: float) -> Tensor:
    ratio, k, decay = (y.now - y.old).sum().exp().detach(), *((1.5, 3.0) if a >= 0 else (3.0, 0.5))
    return weight(y) * ratio**k * torch.exp(decay * (1 - ratio)) * -a * y.now.sum() * y.counts


def sapo(y: Response, a: float) -> Tensor:
    tau = 0.6 if a > 0 else 1.4
    return (
        token_weights(y) * -a * torch.sigmoid(tau * ((y.now - y.old).exp() - 1)) * 4 / tau
    ).mean() * y.counts


def oapl(y: Response, a: float) -> Tensor:
    return weight(y) * (0.2 * (y.now - y.old).sum() - a) ** 2


def less_optimal_value(rewards: list[float]) -> list[float]:
    return [
        r - 0.5 * math.log(sum(math.exp(other / 0.5) for other in rewards) / K) for r in rewards
    ]


def masked_rloo(y: Response, a: float) -> Tensor:
    return -a * y.now.sum() * y.counts * weight(y)


def rloo_of_responses(y: Response, a: float) -> Tensor:
    return weight(y) * clip_loss((y.now - y.old).sum(), a, 0.3, 0.4)


def rloo_of_tokens(y: Response, a: float) -> Tensor:
    return (token_weights(y) * clip_loss(y.now - y.old, a, 0.2, 0.2)).sum()


def grpo_plus(groups: Groups) -> Tensor:
    """The mean over the tokens of all responses that count; with an entropy bonus."""
    counted = [
        (y, a) for g in groups for y, a in zip(g, less_mean(rewards(g)), strict=True) if y.counts
    ]
    losses = [
        token_weights(y) * clip_loss(y.now - y.old, a, 0.2, 0.28) - 0.03 * y.entropy
        for y, a in counted
    ]
    return torch.cat(losses).mean()


def dapo(groups: Groups) -> Tensor:
    """The mean over the tokens of all responses."""
    every = [(y, a) for g in groups for y, a in zip(g, less_mean(rewards(g)), strict=True)]
    return torch.cat([clip_loss(y.now - y.old, a, 0.2, 0.28) for y, a in every]).mean()


def cispo(groups: Groups) -> Tensor:
    every = [(y, a) for g in groups for y, a in zip(g, less_mean(rewards(g)), strict=True)]
    clipped = [(y.now - y.old).exp().detach().clamp(0.8, 1.1) for y, _ in every]
    return -torch.cat(
        [token_weights(y) * w * a * y.now for (y, a), w in zip(every, clipped, strict=True)]
    ).mean()


def reinforce(groups: Groups) -> Tensor:
    """With k2 and an entropy bonus."""
    every = [y for group in groups for y in group]
    mean = sum(y.reward for y in every) / (P * K)
    further = [(0.1 * (y.now - y.ref).square() / 2 - 0.02 * y.entropy).sum() for y in every]
    return sum(
        -(y.reward - mean) * y.now.sum() * weight(y) + f
        for y, f in zip(every, further, strict=True)
    ) / (P * K)


def of_pairs(
    loss: Callable[[Response, Response], Tensor], *, labeled: bool = True, weighs: bool = True
) -> Formula:
    """The mean over all pairs. labeled: the first has the higher reward; ties are 0."""

    def formula(groups: Groups) -> Tensor:
        pairs = [
            (group[i], group[j]) for group in groups for i in range(K) for j in range(i + 1, K)
        ]
        total = 0.0
        for first, second in pairs:
            if labeled and first.reward < second.reward:
                first, second = second, first
            if not labeled or first.reward != second.reward:
                total += loss(first, second) * (weight(first, second) if weighs else 1)
        return total / len(pairs)

    return formula


def dpo(difference: Tensor) -> Tensor:
    return -torch.sigmoid(difference).log()


def smoothed_dpo(difference: Tensor) -> Tensor:
    return 0.8 * dpo(difference) + 0.2 * dpo(-difference)


def masked_rebel(first: Response, second: Response) -> Tensor:
    log_ratio = (first.now - first.old).sum() - (second.now - second.old).sum()
    return (log_ratio / 3 - (first.reward - second.reward)) ** 2 * (first.counts and second.counts)


def masked_copg(first: Response, second: Response) -> Tensor:
    gained = (first.now - first.ref).sum() - (second.now - second.ref).sum()
    return (
        -(first.reward - second.reward - 0.3 / 2 * gained)
        * gained
        * (first.counts and second.counts)
    )


def ppg(first: Response, second: Response) -> Tensor:
    """Equation 6; the KL to the reference is a part of the rewards."""
    worth = [y.reward - 0.05 * (y.now - y.ref).sum().item() for y in (first, second)]
    return -(worth[0] - worth[1]) / 2 * (first.now.sum() - second.now.sum())


def orpo(chosen: Response, rejected: Response) -> Tensor:
    odds = [y.now.mean().exp() / (1 - y.now.mean().exp()) for y in (chosen, rejected)]
    return -chosen.now.mean() + 0.3 * dpo((odds[0] / odds[1]).log())


def slic(chosen: Response, rejected: Response) -> Tensor:
    return (2.0 - chosen.now.sum() + rejected.now.sum()).clamp(min=0) - 0.5 * chosen.now.sum()


def apo_zero(chosen: Response, rejected: Response) -> Tensor:
    return 1 - torch.sigmoid(0.3 * log_ratio(chosen)) + torch.sigmoid(0.3 * log_ratio(rejected))


def apo_down(chosen: Response, rejected: Response) -> Tensor:
    difference = log_ratio(chosen) - log_ratio(rejected)
    return torch.sigmoid(0.3 * log_ratio(chosen)) + 1 - torch.sigmoid(0.3 * difference)


def discopop(chosen: Response, rejected: Response) -> Tensor:
    difference = 0.3 * (log_ratio(chosen) - log_ratio(rejected))
    exponential = torch.sigmoid(difference / 0.2)
    return (1 - exponential) * dpo(difference) + exponential * torch.exp(-difference)


def log_ratio(y: Response) -> Tensor:
    """To the reference."""
    return (y.now - y.ref).sum()


def nash(groups: Groups) -> Tensor:
    """The first two responses, each against the mean preference to the mixture's two."""
    total = 0.0
    for *own, third, fourth in groups:
        for y in own:
            preferred = (
                sum(1 / (1 + math.exp(other.reward - y.reward)) for other in (third, fourth)) / 2
            )
            total += -(preferred - 0.5 - 0.1 * (y.now - y.ref).sum().item()) * y.now.sum()
    return total / (P * 2)


WEIGHTED = {"sampler_ratio_cap": CAP}
K1 = {"kl_estimator": "k1", "kl_coef": 0.05}
K2 = {"kl_estimator": "k2", "kl_coef": 0.1}
CASES = {
    "grpo": (
        WEIGHTED | {"kl_estimator": "k3"},
        of_responses(lambda g: less_mean(rewards(g)), grpo),
    ),
    "dr_grpo": ({}, of_responses(lambda g: less_mean(rewards(g), scale=False), dr_grpo)),
    "dapo": ({}, dapo),
    "grpo_plus": (WEIGHTED | {"entropy_coef": 0.03}, grpo_plus),
    "gspo": (WEIGHTED | K1, of_responses(lambda g: less_mean(rewards(g, 0.05)), gspo)),
    "rloo": (
        WEIGHTED | {"mask_truncated": True},
        of_responses(lambda g: less_others(rewards(g, 0.05)), masked_rloo),
    ),
    "rloo responses": (
        WEIGHTED | {"clipping": "response", "clip_low": 0.3, "clip_high": 0.4},
        of_responses(lambda g: less_others(rewards(g, 0.05)), rloo_of_responses),
    ),
    "rloo tokens": (
        WEIGHTED | {"clipping": "token"},
        of_responses(lambda g: less_others(rewards(g, 0.05)), rloo_of_tokens),
    ),
    "reinforce": (WEIGHTED | K2 | {"entropy_coef": 0.02}, reinforce),
    "rebel": (
        WEIGHTED | {"mask_truncated": True, "eta": 3.0},
        of_pairs(masked_rebel, labeled=False),
    ),
    "cispo": (WEIGHTED | {"clip_low": 0.2, "clip_high": 0.1}, cispo),
    "sapo": (
        WEIGHTED | K1 | {"mask_truncated": True, "tau_pos": 0.6, "tau_neg": 1.4},
        of_responses(lambda g: less_mean(rewards(g, 0.05)), sapo),
    ),
    "vespo": (
        WEIGHTED | {"mask_truncated": True, "k_pos": 1.5, "lambda_neg": 0.5},
        of_responses(lambda g: less_mean(rewards(g)), vespo),
    ),
    "copg": (
        WEIGHTED | {"mask_truncated": True, "kl_coef": 0.3},
        of_pairs(masked_copg, labeled=False),
    ),
    "oapl": (
        WEIGHTED | K1 | {"old_logprobs": "policy", "beta1": 0.5, "beta2": 0.2},
        of_responses(lambda g: less_optimal_value(rewards(g, 0.05)), oapl),
    ),
    "online_dpo": (
        WEIGHTED | {"kl_coef": 0.3},
        of_pairs(lambda y, n: dpo(0.3 * ((y.now - y.ref).sum() - (n.now - n.ref).sum()))),
    ),
    "bpo": (
        WEIGHTED,
        of_pairs(lambda y, n: dpo(0.1 * ((y.now - y.old).sum() - (n.now - n.old).sum()))),
    ),
    "online_ipo": (
        WEIGHTED | {"tau": 0.2},
        of_pairs(
            lambda y, n: ((y.now - y.ref).mean() - (n.now - n.ref).mean() - 1 / (2 * 0.2)) ** 2
        ),
    ),
    "online_simpo": (
        {"beta": 2.5, "gamma": 0.4, "label_smoothing": 0.2},
        of_pairs(
            lambda y, n: smoothed_dpo(2.5 * (y.now.mean() - n.now.mean()) - 0.4), weighs=False
        ),
    ),
    "online_cpo": (
        {"beta": 0.3, "label_smoothing": 0.2},
        of_pairs(
            lambda y, n: smoothed_dpo(0.3 * (y.now.sum() - n.now.sum())) - y.now.sum(), weighs=False
        ),
    ),
    "online_orpo": ({"odds_weight": 0.3}, of_pairs(orpo, weighs=False)),
    "online_slic": ({"delta": 2.0, "nll_weight": 0.5}, of_pairs(slic, weighs=False)),
    "online_apo_zero": ({"beta": 0.3}, of_pairs(apo_zero, weighs=False)),
    "online_apo_down": (WEIGHTED | {"beta": 0.3}, of_pairs(apo_down)),
    "online_discopop": ({"beta": 0.3, "tau": 0.2}, of_pairs(discopop, weighs=False)),
    "nash_md": ({"responses_per_prompt": K}, nash),
    "ppg": (WEIGHTED, of_pairs(ppg, labeled=False)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_and_its_gradient_are_those_of_the_formula(tiny_model, name):
    changes, formula = CASES[name]
    config, on_policy = OBJECTIVES[name.split()[0]](**NAMES, **changes), name == "ppg"
    if hasattr(config, "reward_scaling"):
        config = replace(config, reward_scaling="none", reward_clip=0.0)
    generator = torch.Generator().manual_seed(5)

    def ids(length: int) -> list[int]:
        return torch.randint(2, 200, (length,), generator=generator).tolist()

    def noise(length: int) -> Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64) * 0.3

    prompts = [ids(3), ids(1), ids(5)]
    responses = [
        [ids(int(torch.randint(1, LONGEST + 1, (), generator=generator))) for _ in range(K)]
        for _ in prompts
    ]
    rewards = torch.randn(P, K, generator=generator, dtype=torch.float64)
    rewards[1, 2] = rewards[1, 0]
    counts = torch.rand(P, K, generator=generator) < 0.6
    assert 0 < counts.sum() < P * K
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    weights = list(model.parameters())

    # The formula, from the logits of each response by itself.
    groups: Groups = []
    for p, prompt in enumerate(prompts):
        groups.append([])
        for k, y in enumerate(responses[p]):
            logits = (
                model(torch.tensor([prompt + y])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            )
            now = logits.gather(1, torch.tensor(y)[:, None]).squeeze(1)
            old = now.detach() + (0 if on_policy else noise(len(y)))
            ref, sampler = now.detach() + noise(len(y)), old + noise(len(y))
            entropy = -(logits.exp() * logits).sum(-1)
            groups[-1].append(
                Response(now, old, sampler, ref, entropy, rewards[p, k].item(), bool(counts[p, k]))
            )
    expected = formula(groups)
    wanted = torch.autograd.grad(expected, weights)

    # The objective, from one packed row.
    (row,) = pack(prompts, responses, Packing(tokens_per_row=1000))
    assert row.groups != (0, 1, 2)
    order = list(row.groups)
    every = [y for g in order for y in groups[g]]
    objective = config.build()
    old, ref, sampler = ([getattr(y, name) for y in every] for name in ("old", "ref", "sampler"))
    more = {
        "sampler_token_logprobs": torch.cat(sampler),
        "loss_mask": counts[order] if config.mask_truncated else None,
    }
    microbatch = Microbatch(
        row, objective.scaler(rewards)[order], torch.cat(old), torch.cat(ref), **more
    )
    policy = PackedModel(model)
    ((prepared,),) = objective.prepare(policy, [[microbatch]], lambda sums: sums)
    loss, metrics = objective.loss(
        policy, prepared, objective.divisor(row, prepared.loss_mask) or 1
    )
    if not on_policy:  # whose loss is a constant on-policy
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-8)
    found = torch.autograd.grad(loss, weights)
    for gradient, right in zip(found, wanted, strict=True):
        # the norms compute in fp32
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-7)
    assert not any(metric.requires_grad for metric in metrics.values())
    assert all(
        metric.shape == (() if name.endswith("_max") else (2,)) for name, metric in metrics.items()
    )
