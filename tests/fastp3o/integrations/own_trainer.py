"""fastp3o's own update on the rollouts of another trainer, which that trainer's update must equal."""

from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForCausalLM

from fastp3o.models.loading import load_policy
from fastp3o.models.reference import SecondModel
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.packing.pack import Packing
from fastp3o.runtime.shares import Share
from fastp3o.training.microbatches import (
    equal_passes,
    make_microbatches,
    pack_minibatches,
    policy_logprobs,
)
from tests.fastp3o.groups import groups_of_ids

LEARNING_RATE = 0.5


class Group(NamedTuple):
    """A prompt with its responses, as token ids, and their rewards."""

    prompt: list[int]
    responses: list[list[int]]
    rewards: list[float]


def own_update(
    model: str, rounds: list[list[list[Group]]], inner_epochs=1, **settings
) -> dict[str, torch.Tensor]:
    """The weights after gradient descent on rounds of minibatches of groups, each minibatch a step."""
    accelerator = Accelerator(cpu=True)
    config = P3OConfig(
        model=model, output_dir="", prompts="", reward="", reward_scaling="none", **settings
    )
    objective = config.build()
    policy = load_policy(model)
    reference = SecondModel(load_policy(model), accelerator.device, offload=False)
    optimizer = torch.optim.SGD(policy.parameters(), lr=LEARNING_RATE)
    for minibatches in rounds:
        prepared = []
        for groups in minibatches:
            rollouts = groups_of_ids(
                [group.prompt for group in groups], [group.responses for group in groups]
            )
            rewards = torch.tensor([group.rewards for group in groups])
            rows = pack_minibatches(Share(), rollouts, 1, Packing(100))
            microbatches = make_microbatches(
                accelerator, partial(policy_logprobs, policy), reference, rows, rewards, None
            )
            prepared += equal_passes(accelerator, microbatches, None, objective)
        for _ in range(inner_epochs):
            for passes in prepared:
                for microbatch, _ in passes.rows:
                    objective.loss(policy, microbatch, passes.divisor)[0].backward()
                optimizer.step()
                optimizer.zero_grad()
    return policy.model.state_dict()


def recorded(module: ModuleType) -> list[list[Group]]:
    """A list that every microbatch whose loss a trainer's module computes is added to."""
    microbatches: list[list[Group]] = []
    padded_p3o_loss = module.padded_p3o_loss

    def recording(model, batch, rewards, *arguments, **options):
        microbatches.append(batch_groups(batch, rewards))
        return padded_p3o_loss(model, batch, rewards, *arguments, **options)

    module.padded_p3o_loss = recording
    return microbatches


def batch_groups(batch, rewards: torch.Tensor) -> list[Group]:
    is_response = batch.response_mask.bool()
    prompts, responses = (
        [ids[own].tolist() for ids, own in zip(batch.input_ids, mask, strict=True)]
        for mask in (batch.attention_mask.bool() & ~is_response, is_response)
    )
    K = batch.responses_per_prompt
    assert all(prompts[row] == prompts[row - row % K] for row in range(len(prompts)))
    starts = range(0, len(prompts), K)
    return [
        Group(prompts[first], responses[first : first + K], values)
        for first, values in zip(starts, rewards.tolist(), strict=True)
    ]


def varied(completions: list[str], **_) -> list[float]:
    """Rewards of many values, so that responses to a prompt differ."""
    return [sum(map(ord, completion)) % 64 / 16 for completion in completions]


def plain_descent(model: nn.Module) -> tuple:
    """Optimizer and schedule: plain gradient descent does not enlarge rounding as Adam's first
    steps do.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def assert_own_update(
    found: dict, model: str, rounds: list[list[list[Group]]], *arguments, **settings
) -> None:
    """The weights equal fastp3o's within rounding, and are far from those at the start."""
    start = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for name, expected in own_update(model, rounds, *arguments, **settings).items():
        moved = (expected - start[name]).norm()
        assert moved > 1e-3, name
        assert (found[name] - expected).norm() < 1e-4 * moved, name
