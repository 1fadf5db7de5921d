"""What the online loop samples from: the policy, or for some of the responses its mixture with the reference."""

from typing import TYPE_CHECKING, NamedTuple

from transformers import PreTrainedTokenizerBase

from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.whole_copy import WholeCopy
from fastp3o.objectives.config import MixtureConfig, OnlineConfig
from fastp3o.rollouts.gathered_sampler import GatheredSampler
from fastp3o.rollouts.mixture import MixtureSampler, PartlyFromMixture
from fastp3o.rollouts.named_sampler import named_sampler
from fastp3o.rollouts.sampler import Sampler
from fastp3o.rollouts.sampling_settings import POLICY_ITSELF, SamplingSettings

if TYPE_CHECKING:  # a run imports its own stage only
    from fastp3o.objectives.preferences import PreferenceConfig
    from fastp3o.stages.generate.config import GenerateConfig


class SampledModel(NamedTuple):
    """copy: what is sampled in the place of a model that is spread over the processes."""

    model: PackedModel
    copy: WholeCopy | None

    @property
    def whole(self) -> PackedModel:
        return self.model if self.copy is None else self.copy.model

    def gathered(self, sampler: Sampler) -> Sampler:
        """A sampler of the copy, which has the model's weights for the time of each call."""
        return sampler if self.copy is None else GatheredSampler(sampler, self.model, self.copy)


def policy_sampler(
    config: "OnlineConfig | PreferenceConfig | GenerateConfig",
    policy: SampledModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    settings: SamplingSettings = POLICY_ITSELF,
) -> Sampler:
    """batch_size: prompts sampled at once."""
    sampler = named_sampler(
        config.sampler,
        policy.whole,
        tokenizer,
        max_response_tokens=config.max_response_tokens,
        batch_size=batch_size,
        memory_gb=config.rollout_memory,
        compiles=config.compile_rollouts,
        settings=settings,
        graph=False if policy.copy is not None and policy.copy.by_layer else None,
    )
    return policy.gathered(sampler)


def with_mixture(
    sampler: Sampler,
    config: MixtureConfig,
    policy: SampledModel,
    reference: SampledModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Sampler:
    """Some responses of the policy's sampler, the others of its mixture with the reference.

    Raises ValueError where a process cannot hold both whole.
    """
    for model in (policy, reference):
        if model.copy is not None and model.copy.by_layer:
            raise UserError("--mixture samples from two models, and a process has no room for both of them whole")
    mixture = MixtureSampler(
        policy.whole,
        tokenizer,
        reference.whole,
        config.mixture,
        max_response_tokens=config.max_response_tokens,
        batch_size=config.rollout_batch_size,
        memory=None if config.rollout_memory is None else round(1e9 * config.rollout_memory),
    )
    return PartlyFromMixture(sampler, policy.gathered(reference.gathered(mixture)), config.from_mixture)
