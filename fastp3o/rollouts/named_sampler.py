"""The sampler that a configuration names."""

from transformers import PreTrainedTokenizerBase

from fastp3o.models.packed_model import PackedModel
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.sampler import Sampler
from fastp3o.rollouts.sampling_settings import POLICY_ITSELF, SamplingSettings
from fastp3o.rollouts.transformers_sampler import TransformersSampler


def named_sampler(
    name: str,
    policy: PackedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_response_tokens: int,
    batch_size: int,
    memory_gb: float | None = None,
    compiles: bool = False,
    settings: SamplingSettings = POLICY_ITSELF,
    graph: bool | None = None,
) -> Sampler:
    """Arguments as in `fastp3o.config.SamplerConfig`, and of the engine; batch_size: prompts sampled at once."""
    limits = {"max_response_tokens": max_response_tokens, "batch_size": batch_size}
    if name == "transformers":
        return TransformersSampler(policy, tokenizer, **limits, settings=settings)
    memory = None if memory_gb is None else round(1e9 * memory_gb)
    return EngineSampler(policy, tokenizer, **limits, memory=memory, compiles=compiles, settings=settings, graph=graph)
