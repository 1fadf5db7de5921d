"""Samplers of a model that may be spread over processes, and of its mixture with the reference."""

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from fastp3o.config import PolicyConfig
from fastp3o.context import Context
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sampling_copy import SamplingCopy
from fastp3o.objectives.config import MixtureConfig, OnlineConfig
from fastp3o.rollouts.cache import return_unused_memory
from fastp3o.rollouts.engine_sampler import named_sampler, rollout_bytes
from fastp3o.rollouts.groups import Group, Prompt
from fastp3o.rollouts.mixture import MixtureSampler, partly_from_mixture
from fastp3o.rollouts.sampler import Sampler, sampling_settings
from fastp3o.rollouts.vllm.publisher import Publisher
from fastp3o.rollouts.vllm.sampler import VLLMSampler


class SampledModel(NamedTuple):
    """A model to sample from. copy: sampled in its place, if it is spread over processes, if its weights are finer than
    its passes, or if it has adapters; None if it is sampled itself. publisher: brings it to servers, which sample in
    the place of both; None without.
    """

    model: PackedModel
    copy: SamplingCopy | None
    publisher: Publisher | None = None

    @property
    def sampled(self) -> PackedModel:
        return self.model if self.copy is None else self.copy.model

    def gathered(self, sampler: Sampler) -> Sampler:
        """A sampler of the copy, which has the model's weights during each call: each process gathers them once a call
        and samples on its own.
        """
        copy = self.copy
        if copy is None:
            return sampler

        def sample(prompts: list[Prompt], responses_per_prompt: int, seed: int) -> list[Group]:
            return_unused_memory(copy.memory.device)
            with copy.gathered(self.model):
                groups = sampler(prompts, responses_per_prompt, seed)
            return_unused_memory(copy.memory.device)
            return groups

        return sample


def note_truncation(context: Context, config: OnlineConfig) -> None:
    """Warns of a loss that takes rollouts for samples of the policy, which truncated ones are not."""
    corrected = config.old_logprobs == "sampler" or config.sampler_ratio_cap
    if config.truncates and config.assumes_own_samples and not corrected:
        remedies = "--sampler_ratio_cap" + (" or --old_logprobs sampler" if config.compares_with_old else "")
        context.accelerator.print(
            "warning: with --top_k, --top_p or --min_p rollouts are no samples of the policy, and the gradient is "
            f"biased towards what they leave of it: {remedies} corrects for that (fastp3o/objectives/README.md)"
        )


def policy_sampler(
    config: PolicyConfig,
    policy: SampledModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
) -> Sampler:
    """Builds the policy's sampler. batch_size: prompts sampled at once, by this process's own samplers."""
    if policy.publisher is not None:
        return VLLMSampler(
            policy.publisher,
            tokenizer,
            max_response_tokens=config.max_response_tokens,
            settings=sampling_settings(config),
        )
    sampler = named_sampler(
        config,
        policy.sampled,
        tokenizer,
        max_response_tokens=config.max_response_tokens,
        batch_size=batch_size,
    )
    return policy.gathered(sampler)


def with_mixture(
    sampler: Sampler,
    config: MixtureConfig,
    policy: SampledModel,
    reference: SampledModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Sampler:
    """Takes some responses from the policy's sampler, the others from its mixture with the reference."""
    mixture = MixtureSampler(
        policy.sampled,
        tokenizer,
        reference.sampled,
        config.mixture,
        max_response_tokens=config.max_response_tokens,
        batch_size=config.rollout_batch_size,
        memory=rollout_bytes(config),
    )
    return partly_from_mixture(sampler, policy.gathered(reference.gathered(mixture)), config.from_mixture)
