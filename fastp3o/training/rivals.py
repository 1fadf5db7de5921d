"""Responses that others are compared with: the reference's in training, a rival's in evaluations."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from fastp3o.config import EnvironmentConfig
from fastp3o.errors import UserError
from fastp3o.evaluation.evaluate import EVALUATION
from fastp3o.evaluation.rival import Rival, against_rivals
from fastp3o.models.sharding import FrozenModel
from fastp3o.models.tokenizer import load_tokenizer, vocabulary_difference
from fastp3o.packing.seeds import derived_seed
from fastp3o.packing.shares import process_share
from fastp3o.rewards.load import READ_ANEW
from fastp3o.rewards.model import Translation
from fastp3o.rewards.reward import Reward, logged_means, rewarded, single_rewards
from fastp3o.rewards.rivals import compares
from fastp3o.rollouts.cache import return_unused_memory
from fastp3o.rollouts.groups import Group, Prompt, Response, Sampler, make_prompts
from fastp3o.rollouts.plan import policy_sampler
from fastp3o.runtime.context import Context
from fastp3o.training.build import load_frozen_policy, sampled_here

if TYPE_CHECKING:
    from fastp3o.objectives.config.base import OnlineConfig
    from fastp3o.objectives.config.preferences import PreferenceConfig

# Sets the seed of anchors apart from those of updates, which are counted from 0.
ANCHOR = 2**32 - 5


class Anchors:
    """One response of the reference to each prompt, as long as it stays the same one: a prompt that
    comes again meets the same response.
    """

    def __init__(self, sampler: Sampler, seed: int):
        self.sampler, self.seed = sampler, derived_seed(seed, ANCHOR)

    def __call__(self, prompts: list[Prompt]) -> list[Response]:
        numbered = [prompt._replace(number=crc32(prompt.text.encode())) for prompt in prompts]
        return [group.responses[0] for group in self.sampler(numbered, 1, self.seed)]


def with_rival(
    context: Context,
    config: "OnlineConfig | PreferenceConfig",
    rewards: dict[str, Reward],
    examples: Dataset,
) -> tuple[dict[str, Reward], Rival | None]:
    """The rewards of evaluations, of which those that compare do so with the rival's responses, and
    the rival; None if nothing compares and no rival is named. examples: the prompts of evaluations.
    """
    if not (config.rival or any(map(compares, single_rewards(rewards).values()))) or not rewards:
        return rewards, None
    responses, siblings = config.eval_responses_per_prompt, config.responses_per_prompt - 1
    groups = rival_groups(context, config, examples, max(responses, siblings))
    of_rival = [group.responses for group in groups]
    rewards = against_rivals(rewards, of_rival, siblings)
    with context.accelerator.autocast():
        values = rewarded(rewards, [Group(prompt, its[:responses]) for prompt, its in groups])
    logged_means(rewards)  # what functions have logged of a rival is no metric of the policy's
    return rewards, Rival(of_rival, values)


def rival_groups(
    context: Context, config: "OnlineConfig | PreferenceConfig", examples: Dataset, count: int
) -> list[Group]:
    """The rival's responses to this process's prompts of evaluations, with the seed of the
    policy's: where both are the same model, their responses are, too. A rival of another vocabulary
    reads the prompts in its own tokens, and its responses come back in the policy's. The model is
    gone afterwards.
    """
    tokenizer = other_tokenizer(context, config) if config.rival else None
    numbers = process_share(list(range(len(examples))), context.accelerator)
    prompts = make_prompts(examples[numbers], numbers)
    of_rival = context if tokenizer is None else context._replace(tokenizer=tokenizer)
    read = prompts if tokenizer is None else in_tokens_of(tokenizer, context, config, prompts)
    frozen = load_frozen_policy(context, config, config.rival or config.model_source)
    # Its tokens of a text may be more than the policy's.
    frozen.check_reach(max(len(prompt.ids) for prompt in read) + config.max_response_tokens)
    sampled = sampled_here(config, frozen, of_rival)
    FrozenModel(frozen, context.device, context.mesh, offload=False)
    sampler = policy_sampler(config, sampled, of_rival, config.rollout_batch_size)
    groups = sampler(read, count, derived_seed(config.seed, EVALUATION))
    del frozen, sampled, sampler
    return_unused_memory(context.device)
    if tokenizer is None:
        return groups
    back = Translation(tokenizer, context.tokenizer)
    return [
        in_policys_tokens(back, prompt, its)
        for prompt, (_, its) in zip(prompts, groups, strict=True)
    ]


# --- a rival of another vocabulary ----------------------------------------------------------------


def other_tokenizer(
    context: Context, config: "OnlineConfig | PreferenceConfig"
) -> PreTrainedTokenizerBase | None:
    """The rival's tokenizer if its vocabulary is not the policy's, else None. Raises UserError with
    an environment.
    """
    rival, remote = config.rival or "", config.trust_remote_code
    difference = vocabulary_difference(
        rival, config.model_source, context.tokenizer, trust_remote_code=remote
    )
    if not difference:
        return None
    if isinstance(config, EnvironmentConfig) and config.environment:
        raise UserError(
            f"--rival {rival} has another vocabulary than the policy ({difference}), which --environment excludes: "
            "observations come between a trajectory's turns as the policy's tokens"
        )
    context.accelerator.print(
        f"the rival {rival} has another vocabulary: it reads prompts in its own tokens, by its own chat template where "
        "they are messages, and its texts are compared"
    )
    return load_tokenizer(rival, trust_remote_code=remote)


def in_tokens_of(
    tokenizer: PreTrainedTokenizerBase,
    context: Context,
    config: "OnlineConfig | PreferenceConfig",
    prompts: Sequence[Prompt],
) -> list[Prompt]:
    """The prompts with the ids that a model of this tokenizer has for them, as reward models of
    another vocabulary.
    """
    reading = {name: config.reading[name] for name in READ_ANEW} | {"clock": context.clock}
    translate = Translation(context.tokenizer, tokenizer, **reading)
    ids, _ = translate([Group(prompt, []) for prompt in prompts])
    return [prompt._replace(ids=its) for prompt, its in zip(prompts, ids, strict=True)]


def in_policys_tokens(back: Translation, prompt: Prompt, responses: list[Response]) -> Group:
    """The group with the texts of responses in the policy's tokens, for rewards that read these."""
    ids = back.response_ids(Group(prompt, responses), prompt.ids)
    return Group(
        prompt,
        [one._replace(ids=its, logprobs=None) for one, its in zip(responses, ids, strict=True)],
    )
