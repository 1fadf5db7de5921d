"""Checkpoints respond to the same prompts; a reward or a judge says whose responses are better."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastp3o.data.loading import load_prompts
from fastp3o.errors import UserError
from fastp3o.evaluation.config import EvaluateConfig, SamplingConfig, WinRateConfig
from fastp3o.evaluation.judge import Judge
from fastp3o.evaluation.length_controlled import NotDeterminedError, length_controlled
from fastp3o.evaluation.verdicts import POINTS, WinRate, win_rate
from fastp3o.models.attention import choose_attention
from fastp3o.models.frozen import load_frozen_policy
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.rewards.comparisons import Comparison, RelativeReward
from fastp3o.rewards.load import load_named_reward
from fastp3o.rewards.reward import asked_of_records, rewarded
from fastp3o.rewards.rivals import compares, longer_than
from fastp3o.rewards.verdicts import Verdict, verdict_of
from fastp3o.rollouts.groups import Group, lengths, make_prompts, texts
from fastp3o.rollouts.plan import policy_sampler, sampled_frozen
from fastp3o.rollouts.prefix import Prefix
from fastp3o.runtime.context import Context
from fastp3o.runtime.precision import choose_precision


@dataclass(frozen=True)
class Responses:
    """One checkpoint's responses, and their rewards by the rewards' names, an environment's with
    their parts. relative: the reward that compares them with another's, if it is one.
    """

    groups: list[Group]
    rewards: dict[str, Tensor]  # [P, K] fp32
    relative: RelativeReward | None = None

    @property
    def mean_tokens(self) -> float:
        """Tokens per response, including the end-of-sequence token."""
        return lengths(self.groups).double().mean().item()


def responses_of_all(config: WinRateConfig) -> list[Responses]:
    """Each checkpoint's responses to the same prompts with the same seed, and their rewards if
    asked for. One checkpoint is in memory at a time. Raises ValueError if their tokenizers make
    different texts of the prompts (chat template, length limit): they would not respond to the same
    prompts.
    """
    checkpoints = config.checkpoints
    tokenizers = [load_tokenizer(name, **config.tokenizer_options) for name in checkpoints]
    prompts = [prompts_for(tokenizer, config) for tokenizer in tokenizers]
    texts_of_first = list(prompts[0]["prompt"])
    for name, others in zip(checkpoints, prompts, strict=True):
        if list(others["prompt"]) != texts_of_first:
            names = f"the tokenizers of {checkpoints[0]} and {name}"
            raise UserError(
                f"{names} make different texts of {config.prompts}, by template or --max_prompt_tokens"
            )
    return [
        respond(*arguments, config)
        for arguments in zip(checkpoints, tokenizers, prompts, strict=True)
    ]


def prompts_for(tokenizer: PreTrainedTokenizerBase, config: SamplingConfig) -> Dataset:
    """The prompts, with the columns that rewards and the environment ask for."""
    asked = asked_of_records(config.scorers, config)
    prompts, report = load_prompts(config.prompts, tokenizer, **asked, **config.reading)
    print(f"{config.prompts} for {tokenizer.name_or_path}: {report}")
    return prompts


def respond(
    checkpoint: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Dataset,
    config: WinRateConfig | EvaluateConfig,
) -> Responses:
    """The checkpoint's responses, in the precision in which P3O samples and rewards, and their
    rewards.
    """
    precision = choose_precision("auto", automatic="fp16")
    context = Context(Accelerator(), precision, tokenizer, None)
    choose_attention(config.attention, context.device)
    rewards = {
        str(name): load_named_reward(context, config, config, name, prompts)
        for name in config.scorers
    }
    if isinstance(config, EvaluateConfig) and (
        compare := [name for name in rewards if compares(rewards[name])]
    ):
        raise UserError(
            f"--reward {compare[0]} compares responses with others, as `fastp3o win_rate` does: it has no mean"
        )
    policy = load_frozen_policy(context, config, checkpoint)
    prefix = Prefix(tokenizer, config.prefix)
    policy.check_reach(config.longest_sequence + len(prefix.ids))
    sampler = policy_sampler(
        config, sampled_frozen(config, policy, context), context, config.rollout_batch_size
    )
    groups = prefix.before_each(sampler)(
        make_prompts(prompts[:]), config.responses_per_prompt, config.seed
    )
    relative = {
        name: reward for name, reward in rewards.items() if isinstance(reward, RelativeReward)
    }
    if isinstance(config, WinRateConfig):
        scoring = {name: reward for name, reward in rewards.items() if name not in relative}
        return Responses(groups, rewarded(scoring, groups), next(iter(relative.values()), None))
    return Responses(groups, rewarded(rewards, groups))


def win_rates(
    config: WinRateConfig, judge: Judge | None, first: Responses, second: Responses
) -> Iterator[tuple[str, WinRate]]:
    """Win rates of the first checkpoint, by "reward" and by "judge" as configured, each as soon as
    it is known.
    """
    longer = (
        longer_than(first.groups, [group.responses for group in second.groups]).flatten().numpy()
    )

    def rate(name: str, verdicts: list[Verdict]) -> tuple[str, WinRate]:
        known = win_rate(verdicts, responses_per_prompt=config.responses_per_prompt)
        try:
            at_equal_length = length_controlled(
                np.array([POINTS[verdict] for verdict in verdicts]), longer
            )
        except NotDeterminedError as error:
            print(f"no length-controlled win rate by {name}: {error}")
            return name, known
        return name, replace(known, length_controlled=at_equal_length)

    if config.reward:
        compared = by_reward if first.relative is None else by_comparison
        yield rate("reward", compared(first, second))
    if judge is not None:
        prompts, first_responses = texts(first.groups)
        _, second_responses = texts(second.groups)
        yield rate("judge", judge(prompts, first_responses, second_responses))


def by_comparison(first: Responses, second: Responses) -> list[Verdict]:
    """Whom the reward that compares prefers with a probability above 1/2."""
    assert first.relative is not None
    comparisons = [
        Comparison(prompt, response, other, (place, None))
        for (prompt, responses), (_, others) in zip(first.groups, second.groups, strict=True)
        for place, (response, other) in enumerate(zip(responses, others, strict=True))
    ]
    return [verdict_of(preferred) for preferred in first.relative.preferred(comparisons).tolist()]


def by_reward(first: Responses, second: Responses) -> list[Verdict]:
    """The higher reward wins; equal rewards are a tie. So are equal responses: packed differently,
    their rewards may differ by rounding. Raises UserError if a reward is not finite.
    """
    sides = []
    for name, side in (("first", first), ("second", second)):
        rewards = next(iter(side.rewards.values())).flatten().tolist()
        if broken := [place for place, reward in enumerate(rewards) if not isfinite(reward)]:
            what = f"{len(broken)} of {len(rewards)} rewards of the {name} checkpoint"
            raise UserError(f"{what} are not finite, the first that of response {broken[0]}")
        responses = [
            (response.text, response.finished, response.turns)
            for group in side.groups
            for response in group.responses
        ]
        sides.append(zip(responses, rewards, strict=True))
    verdicts = []
    for (response, reward), (other, others_reward) in zip(*sides, strict=True):
        better = Verdict.FIRST if reward > others_reward else Verdict.SECOND
        verdicts.append(Verdict.TIE if response == other or reward == others_reward else better)
    return verdicts
