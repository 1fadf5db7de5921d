"""Checkpoints respond to the same prompts; a reward or a judge says whose responses are better."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastp3o.context import Context
from fastp3o.data import load_prompts
from fastp3o.errors import UserError
from fastp3o.evaluation.config import WinRateConfig
from fastp3o.evaluation.judge import Judge
from fastp3o.evaluation.verdicts import Verdict, WinRate, reward_verdicts, win_rate
from fastp3o.models.loading import load_policy, load_tokenizer
from fastp3o.precision import choose_precision
from fastp3o.rewards.remote import RemoteReward
from fastp3o.rewards.reward import asked_columns, load_reward
from fastp3o.rollouts.engine_sampler import named_sampler
from fastp3o.rollouts.groups import Group, Prompt, make_prompts, texts
from fastp3o.rollouts.sampler import Sampler, sampling_settings
from fastp3o.rollouts.vllm.publisher import Publisher
from fastp3o.rollouts.vllm.sampler import VLLMSampler


@dataclass(frozen=True)
class Responses:
    """One checkpoint's responses, and their rewards if there is one."""

    groups: list[Group]
    rewards: Tensor | None  # [P, K] fp32

    @property
    def mean_tokens(self) -> float:
        """Tokens per response, including the end-of-sequence token."""
        return fmean(len(response.ids) for group in self.groups for response in group.responses)


def responses_of_all(config: WinRateConfig) -> list[Responses]:
    """Each checkpoint's responses to the same prompts with the same seed, and their rewards if asked for.

    One checkpoint is in memory at a time. Raises ValueError if their tokenizers make different texts of the prompts
    (chat template, length limit): they would not respond to the same prompts.
    """
    checkpoints = config.checkpoints
    tokenizers = [load_tokenizer(name, trust_remote_code=config.trust_remote_code) for name in checkpoints]
    prompts = [prompts_for(tokenizer, config) for tokenizer in tokenizers]
    texts_of_first = [prompt.text for prompt in prompts[0]]
    for name, others in zip(checkpoints, prompts, strict=True):
        if [prompt.text for prompt in others] != texts_of_first:
            raise UserError(
                f"the tokenizers of {checkpoints[0]} and {name} make different texts of {config.prompts}: their "
                "chat templates differ, or their tokens and a prompt is longer than --max_prompt_tokens"
            )
    return [respond(*one, config) for one in zip(checkpoints, tokenizers, prompts, strict=True)]


def prompts_for(tokenizer: PreTrainedTokenizerBase, config: WinRateConfig) -> list[Prompt]:
    """The prompts, with the columns that the reward asks for."""
    prompts, report = load_prompts(
        config.prompts,
        tokenizer,
        columns=asked_columns([config.reward], config) if config.reward else None,
        **config.prompt_options,
    )
    print(f"{config.prompts} for {tokenizer.name_or_path}: {report}")
    return make_prompts(prompts[:])


def respond(
    checkpoint: str, tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt], config: WinRateConfig
) -> Responses:
    """The checkpoint's responses, in the precision in which P3O samples and rewards, and their rewards."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = choose_precision("auto", automatic="fp16")
    loading: dict[str, Any] = {
        "device": device,
        "dtype": precision.weights,
        "trust_remote_code": config.trust_remote_code,
    }
    reward = None
    if config.reward:
        reward = load_reward(config.reward, tokenizer, remote=config, packing=config.packing, **loading)
    if isinstance(reward, RemoteReward):
        reward.check(prompts[0])
    policy = load_policy(checkpoint, **loading)
    policy.temperature = config.temperature
    policy.check_reach(config.longest_sequence)
    sampler: Sampler
    longest = config.max_response_tokens
    if config.sampler == "vllm":
        publisher = Publisher(
            Context(Accelerator(), precision, tokenizer, None), config, config.longest_sequence, policy
        )
        settings = sampling_settings(config)
        sampler = VLLMSampler(publisher, tokenizer, max_response_tokens=longest, settings=settings)
    else:
        sampler = named_sampler(
            config, policy, tokenizer, max_response_tokens=longest, batch_size=config.rollout_batch_size
        )
    groups = sampler(prompts, config.responses_per_prompt, config.seed)
    return Responses(groups, None if reward is None else reward(groups))


def win_rates(
    config: WinRateConfig, judge: Judge | None, first: Responses, second: Responses
) -> Iterator[tuple[str, WinRate]]:
    """Win rates of the first checkpoint, by "reward" and by "judge" as configured, each as soon as it is known."""
    rate = partial(win_rate, responses_per_prompt=config.responses_per_prompt, seed=config.seed)
    if config.reward:
        yield "reward", rate(by_reward(first, second))
    if judge is not None:
        prompts, first_responses = texts(first.groups)
        _, second_responses = texts(second.groups)
        yield "judge", rate(judge(prompts, first_responses, second_responses))


def by_reward(first: Responses, second: Responses) -> list[Verdict]:
    """The higher reward wins. Equal responses are a tie: packed differently, their rewards may differ by rounding."""
    responses = (
        [(response.text, response.finished) for group in side.groups for response in group.responses]
        for side in (first, second)
    )
    same = [one == other for one, other in zip(*responses, strict=True)]
    if first.rewards is None or second.rewards is None:
        raise UserError("responses without rewards cannot be compared by them")
    verdicts = reward_verdicts(first.rewards.flatten().tolist(), second.rewards.flatten().tolist())
    return [Verdict.TIE if equal else verdict for equal, verdict in zip(same, verdicts, strict=True)]
