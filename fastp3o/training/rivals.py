"""Responses that others are compared with: the reference's in training, a rival's in evaluations."""

from typing import TYPE_CHECKING
from zlib import crc32

from datasets import Dataset
from torch import Tensor

from fastp3o.evaluation.evaluate import EVALUATION
from fastp3o.evaluation.rival import against_rivals
from fastp3o.models.sharding import FrozenModel
from fastp3o.models.tokenizer import require_same_vocabulary
from fastp3o.packing.seeds import derived_seed
from fastp3o.packing.shares import process_share
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
) -> tuple[dict[str, Reward], dict[str, Tensor] | None]:
    """The rewards of evaluations, of which those that compare do so with the rival's responses, and
    the rival's values of all of them, [P, K] each; None if nothing compares and no rival is named.
    examples: the prompts of evaluations.
    """
    if not (config.rival or any(map(compares, single_rewards(rewards).values()))) or not rewards:
        return rewards, None
    responses, siblings = config.eval_responses_per_prompt, config.responses_per_prompt - 1
    groups = rival_groups(context, config, examples, max(responses, siblings))
    rewards = against_rivals(rewards, [group.responses for group in groups], siblings)
    with context.accelerator.autocast():
        values = rewarded(rewards, [Group(prompt, its[:responses]) for prompt, its in groups])
    logged_means(rewards)  # what functions have logged of a rival is no metric of the policy's
    return rewards, values


def rival_groups(
    context: Context, config: "OnlineConfig | PreferenceConfig", examples: Dataset, count: int
) -> list[Group]:
    """The rival's responses to this process's prompts of evaluations, with the seed of the
    policy's: where both are the same model, their responses are, too. The model is gone afterwards.
    """
    if config.rival:
        remote = config.trust_remote_code
        policy = config.model_source
        require_same_vocabulary(
            config.rival, policy, context.tokenizer, trust_remote_code=remote, role="rival"
        )
    numbers = process_share(list(range(len(examples))), context.accelerator)
    frozen = load_frozen_policy(context, config, config.rival or config.model_source)
    sampled = sampled_here(config, frozen, context)
    FrozenModel(frozen, context.device, context.mesh, offload=False)
    sampler = policy_sampler(config, sampled, context, config.rollout_batch_size)
    groups = sampler(
        make_prompts(examples[numbers], numbers), count, derived_seed(config.seed, EVALUATION)
    )
    del frozen, sampled, sampler
    return_unused_memory(context.device)
    return groups
