"""Each objective's loss of a packed row, and its gradient by every weight, against its formula written out from whole
logits, response by response, in fp64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastp3o.models.packed_model import PackedModel
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.p3o import PPGConfig
from fastp3o.objectives.policy_gradient import (
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GRPOPlusConfig,
    GSPOConfig,
    REBELConfig,
    REINFORCEConfig,
    RLOOConfig,
)
from fastp3o.objectives.preferences import BPOConfig, NashMDConfig, OnlineDPOConfig, OnlineIPOConfig, OnlineSimPOConfig
from fastp3o.packing.pack import Packing, pack

P, K, LONGEST = 3, 4, 9
NAMES = {"model": "m", "output_dir": "o", "prompts": "p", "reward": "r", "max_response_tokens": LONGEST}


@dataclass
class Response:
    """One response: its tokens' log-probs now, of the old policy, what sampled and the reference, entropies; reward and
    mask.
    """

    now: Tensor
    old: Tensor
    sampler: Tensor
    ref: Tensor
    entropy: Tensor
    reward: float
    counts: bool


Groups = list[list[Response]]


def clip_loss(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def group_advantages(group: list[Response], rewards: list[float], *, scale: bool) -> list[float]:
    mean = sum(rewards) / K
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (K - 1))
    return [(r - mean) / (std + 1e-4) if scale else r - mean for r in rewards]


def kl_rewards(group: list[Response], beta: float) -> list[float]:
    return [y.reward - beta * (y.old - y.ref).sum().item() for y in group]


def plain_rewards(group: list[Response]) -> list[float]:
    return [y.reward for y in group]


def k3(y: Response) -> Tensor:
    return (y.ref - y.now).exp() - 1 - (y.ref - y.now)


def k2(y: Response) -> Tensor:
    return (y.now - y.ref).square() / 2


def weight(cap: float | None, *responses: Response) -> float:
    """The importance weight of responses that are sampled together; 1 without a cap."""
    return 1.0 if cap is None else min(math.exp(sum((y.old - y.sampler).sum().item() for y in responses)), cap)


def token_weights(cap: float | None, y: Response) -> Tensor:
    return torch.ones_like(y.old) if cap is None else (y.old - y.sampler).exp().clamp(max=cap)


def grpo(groups: Groups, *, cap: float | None = None) -> Tensor:
    """The mean over responses of means over tokens; k3."""
    total = 0.0
    for group in groups:
        for y, a in zip(group, group_advantages(group, plain_rewards(group), scale=True), strict=True):
            total += (token_weights(cap, y) * clip_loss((y.now - y.old).exp(), a, 0.2, 0.2) + 0.04 * k3(y)).mean()
    return total / (P * K)


def dr_grpo(groups: Groups) -> Tensor:
    total = 0.0
    for group in groups:
        for y, a in zip(group, group_advantages(group, plain_rewards(group), scale=False), strict=True):
            total += clip_loss((y.now - y.old).exp(), a, 0.2, 0.2).sum() / LONGEST
    return total / (P * K)


def dapo(groups: Groups, *, masked: bool = False, entropy: float = 0.0, cap: float | None = None) -> Tensor:
    total, tokens = 0.0, 0
    for group in groups:
        for y, a in zip(group, group_advantages(group, plain_rewards(group), scale=True), strict=True):
            if y.counts or not masked:
                clipped = token_weights(cap, y) * clip_loss((y.now - y.old).exp(), a, 0.2, 0.28)
                total += (clipped - entropy * y.entropy).sum()
                tokens += len(y.now)
    return total / tokens


def gspo(groups: Groups, *, cap: float | None = None) -> Tensor:
    total = 0.0
    for group in groups:
        for y, a in zip(group, group_advantages(group, kl_rewards(group, 0.05), scale=True), strict=True):
            total += weight(cap, y) * clip_loss((y.now - y.old).mean().exp(), a, 3e-4, 4e-4)
    return total / (P * K)


def rloo(groups: Groups, *, masked: bool, cap: float | None = None) -> Tensor:
    total = 0.0
    for group in groups:
        rewards = kl_rewards(group, 0.05)
        for k, y in enumerate(group):
            baseline = sum(r for j, r in enumerate(rewards) if j != k) / (K - 1)
            total += -(rewards[k] - baseline) * y.now.sum() * (y.counts or not masked) * weight(cap, y)
    return total / (P * K)


def reinforce_with_k2_and_entropy(groups: Groups, *, cap: float | None = None) -> Tensor:
    every = [y for group in groups for y in group]
    mean = sum(y.reward for y in every) / (P * K)
    each = [
        -(y.reward - mean) * y.now.sum() * weight(cap, y) + 0.1 * k2(y).sum() - 0.02 * y.entropy.sum() for y in every
    ]
    return sum(each) / (P * K)


def pairs(group: list[Response]) -> list[tuple[Response, Response]]:
    return [(group[i], group[j]) for i in range(K) for j in range(i + 1, K)]


def rebel(groups: Groups, *, eta: float, masked: bool = False, cap: float | None = None) -> Tensor:
    total, count = 0.0, 0
    for group in groups:
        for first, second in pairs(group):
            log_ratio = (first.now - first.old).sum() - (second.now - second.old).sum()
            square = (log_ratio / eta - (first.reward - second.reward)) ** 2
            total += square * ((first.counts and second.counts) or not masked) * weight(cap, first, second)
            count += 1
    return total / count


def summed_by_label(groups: Groups, loss: Callable[[Response, Response], Tensor]) -> Tensor:
    total, count = 0.0, 0
    for group in groups:
        for first, second in pairs(group):
            count += 1
            if first.reward != second.reward:
                total += loss(first, second) if first.reward > second.reward else loss(second, first)
    return total / count


def dpo(groups: Groups, anchor: str, beta: float, *, cap: float | None = None) -> Tensor:
    def loss(chosen: Response, rejected: Response) -> Tensor:
        difference = (chosen.now - getattr(chosen, anchor)).sum() - (rejected.now - getattr(rejected, anchor)).sum()
        return -torch.sigmoid(beta * difference).log() * weight(cap, chosen, rejected)

    return summed_by_label(groups, loss)


def ipo(groups: Groups, tau: float, *, cap: float | None = None) -> Tensor:
    def loss(chosen: Response, rejected: Response) -> Tensor:
        distance = (chosen.now - chosen.ref).mean() - (rejected.now - rejected.ref).mean() - 1 / (2 * tau)
        return distance**2 * weight(cap, chosen, rejected)

    return summed_by_label(groups, loss)


def simpo(groups: Groups, beta: float, gamma: float) -> Tensor:
    def loss(chosen: Response, rejected: Response) -> Tensor:
        return -torch.sigmoid(beta * (chosen.now.mean() - rejected.now.mean()) - gamma).log()

    return summed_by_label(groups, loss)


def ppg(groups: Groups, *, cap: float | None = None) -> Tensor:
    """Equation 6, the mean over pairs; the KL to the reference is a part of the rewards."""
    total, count = 0.0, 0
    for group in groups:
        worth = {id(y): y.reward - 0.05 * (y.now - y.ref).sum().item() for y in group}
        for first, second in pairs(group):
            difference = (worth[id(first)] - worth[id(second)]) * weight(cap, first, second)
            total += -difference / 2 * (first.now.sum() - second.now.sum())
            count += 1
    return total / count


def nash(groups: Groups) -> Tensor:
    """The first two responses, each against the mean preference to the mixture's two."""
    total = 0.0
    for *own, third, fourth in groups:
        for y in own:
            preferred = sum(1 / (1 + math.exp(other.reward - y.reward)) for other in (third, fourth)) / 2
            total += -(preferred - 0.5 - 0.1 * (y.now - y.ref).sum().item()) * y.now.sum()
    return total / (P * 2)


CASES = {
    "grpo": (GRPOConfig, {}, grpo),
    "dr_grpo": (DrGRPOConfig, {}, dr_grpo),
    "dapo": (DAPOConfig, {}, dapo),
    "dapo, entropy": (DAPOConfig, {"entropy_coef": 0.03}, lambda groups: dapo(groups, entropy=0.03)),
    "grpo_plus": (GRPOPlusConfig, {}, lambda groups: dapo(groups, masked=True)),
    "gspo, KL in rewards": (GSPOConfig, {"kl_estimator": "k1", "kl_coef": 0.05}, gspo),
    "rloo": (RLOOConfig, {}, lambda groups: rloo(groups, masked=False)),
    "rloo, masked": (RLOOConfig, {"mask_truncated": True}, lambda groups: rloo(groups, masked=True)),
    "reinforce, k2, entropy": (
        REINFORCEConfig,
        {"kl_estimator": "k2", "kl_coef": 0.1, "entropy_coef": 0.02},
        reinforce_with_k2_and_entropy,
    ),
    "rebel": (REBELConfig, {"eta": 3.0}, lambda groups: rebel(groups, eta=3.0)),
    "rebel, masked": (REBELConfig, {"mask_truncated": True}, lambda groups: rebel(groups, eta=1.0, masked=True)),
    "online_dpo": (OnlineDPOConfig, {"kl_coef": 0.3}, lambda groups: dpo(groups, "ref", 0.3)),
    "bpo": (BPOConfig, {}, lambda groups: dpo(groups, "old", 0.1)),
    "online_ipo": (OnlineIPOConfig, {"tau": 0.2}, lambda groups: ipo(groups, 0.2)),
    "online_simpo": (OnlineSimPOConfig, {"beta": 2.5, "gamma": 0.4}, lambda groups: simpo(groups, 2.5, 0.4)),
    "nash_md": (NashMDConfig, {"responses_per_prompt": K}, nash),
    "ppg": (PPGConfig, {"reward_scaling": "none", "reward_clip": 0.0}, ppg),
}
CAP = 1.2
SAMPLED_ELSEWHERE = {
    "grpo": (GRPOConfig, {}, lambda groups: grpo(groups, cap=CAP)),
    "grpo_plus": (GRPOPlusConfig, {}, lambda groups: dapo(groups, masked=True, cap=CAP)),
    "gspo, KL in rewards": (
        GSPOConfig,
        {"kl_estimator": "k1", "kl_coef": 0.05},
        lambda groups: gspo(groups, cap=CAP),
    ),
    "rloo, masked": (RLOOConfig, {"mask_truncated": True}, lambda groups: rloo(groups, masked=True, cap=CAP)),
    "reinforce, k2, entropy": (
        REINFORCEConfig,
        {"kl_estimator": "k2", "kl_coef": 0.1, "entropy_coef": 0.02},
        lambda groups: reinforce_with_k2_and_entropy(groups, cap=CAP),
    ),
    "rebel, masked": (
        REBELConfig,
        {"mask_truncated": True},
        lambda groups: rebel(groups, eta=1.0, masked=True, cap=CAP),
    ),
    "online_dpo": (OnlineDPOConfig, {"kl_coef": 0.3}, lambda groups: dpo(groups, "ref", 0.3, cap=CAP)),
    "bpo": (BPOConfig, {}, lambda groups: dpo(groups, "old", 0.1, cap=CAP)),
    "online_ipo": (OnlineIPOConfig, {"tau": 0.2}, lambda groups: ipo(groups, 0.2, cap=CAP)),
    "ppg": (PPGConfig, {"reward_scaling": "none", "reward_clip": 0.0}, lambda groups: ppg(groups, cap=CAP)),
}
CASES |= {
    f"{name}, weights": (config, settings | {"sampler_ratio_cap": CAP}, formula)
    for name, (config, settings, formula) in SAMPLED_ELSEWHERE.items()
}


@pytest.fixture(scope="module")
def problem(tiny_model: str):
    """A policy in fp64, a row of P prompts with K ragged responses each, and their constants."""
    generator = torch.Generator().manual_seed(5)

    def ids(length: int) -> list[int]:
        return torch.randint(2, 200, (length,), generator=generator).tolist()

    prompts = [ids(3), ids(1), ids(5)]
    responses = [[ids(int(torch.randint(1, LONGEST + 1, (), generator=generator))) for _ in range(K)] for _ in prompts]
    rewards = torch.randn(P, K, generator=generator, dtype=torch.float64)
    rewards[1, 2] = rewards[1, 0]
    counts = torch.rand(P, K, generator=generator) < 0.6
    assert counts.any()
    assert not counts.all()
    lengths = [len(y) for group in responses for y in group]
    noise = [torch.randn(sum(lengths), generator=generator, dtype=torch.float64) * 0.3 for _ in range(3)]
    return prompts, responses, rewards, counts, lengths, noise


@pytest.mark.parametrize("name", CASES)
def test_the_loss_and_its_gradient_are_those_of_the_formula(tiny_model, problem, name):
    config_class, changes, formula = CASES[name]
    config = config_class(**NAMES, **changes)
    prompts, responses, rewards, counts, lengths, (old_noise, ref_noise, sampler_noise) = problem
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    weights = list(model.parameters())

    # The formula, from the logits of each response by itself.
    groups: Groups = []
    token = 0
    on_policy = config_class is PPGConfig
    for prompt, group, group_rewards, group_counts in zip(prompts, responses, rewards, counts, strict=True):
        groups.append([])
        for y, reward, counted in zip(group, group_rewards, group_counts, strict=True):
            logits = model(torch.tensor([prompt + y])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            now = logits.gather(1, torch.tensor(y)[:, None]).squeeze(1)
            here = slice(token, token := token + len(y))
            old = now.detach() + (0 if on_policy else old_noise[here])
            ref = now.detach() + ref_noise[here]
            sampler = old + sampler_noise[here]
            entropy = -(logits.exp() * logits).sum(-1)
            groups[-1].append(Response(now, old, sampler, ref, entropy, reward.item(), bool(counted)))
    expected = formula(groups)
    wanted = torch.autograd.grad(expected, weights)

    # The objective, from one packed row.
    every = [y for group in groups for y in group]
    old, ref, sampler = (torch.cat([getattr(y, name) for y in every]) for name in ("old", "ref", "sampler"))
    sums = [torch.stack([part.sum() for part in tokens.split(lengths)]).view(P, K) for tokens in (old, ref)]
    (row,) = pack(prompts, responses, Packing(tokens_per_row=1000))
    assert row.groups != (0, 1, 2)
    order = list(row.groups)
    response_order = [part for g in order for part in range(g * K, g * K + K)]
    old, ref, sampler = (
        torch.cat([tokens.split(lengths)[s] for s in response_order]) for tokens in (old, ref, sampler)
    )
    objective = config.build()
    microbatch = Microbatch(
        row,
        objective.scaler(rewards)[order],
        old,
        ref,
        sums[0][order],
        sums[1][order],
        sampler_token_logprobs=sampler,
        loss_mask=counts[order] if config.mask_truncated else None,
    )
    policy = PackedModel(model)
    ((prepared,),) = objective.prepare(policy, [[microbatch]], lambda sums: sums)
    loss, metrics = objective.loss(policy, prepared, objective.divisor(row, prepared.loss_mask) or 1)
    if not on_policy:  # whose loss is a constant on-policy
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-8)
    found = torch.autograd.grad(loss, weights)
    for weight, gradient in zip(wanted, found, strict=True):
        torch.testing.assert_close(gradient, weight, rtol=1e-4, atol=1e-7)  # the norms compute in fp32
    assert not any(metric.requires_grad for metric in metrics.values())
    assert all(metric.shape == (() if name.endswith("_max") else (2,)) for name, metric in metrics.items())
