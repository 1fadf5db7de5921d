"""The type of samplers, and their common parts."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastp3o.config import SamplerConfig
from fastp3o.packing.packed_row import Ids
from fastp3o.rollouts.groups import Group, Prompt, Response

# sampler(prompts, K, seed) returns a group with K responses for each prompt, in the same order. Equal seeds give equal
# responses of equal policies. By default a sampler draws from the policy itself, whose ratios and KL P3O is about.
Sampler = Callable[[list[Prompt], int, int], list[Group]]


@dataclass(frozen=True)
class SamplingSettings:
    """The choice of tokens from the policy's distribution; by default they are samples of it. Its temperature is the
    policy's own (`PackedModel.temperature`).

    top_k: only the k most likely tokens, 0 for all. top_p: only the most likely tokens that together have this
    probability. min_p: only tokens with this share of the most likely one's probability.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


POLICY_ITSELF = SamplingSettings()


def sampling_settings(config: SamplerConfig) -> SamplingSettings:
    return SamplingSettings(config.top_k, config.top_p, config.min_p)


def end_of_sequence_ids(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokenizer's end-of-sequence and those that the checkpoint stops at (a chat model's end of turn)."""
    own = policy.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(own if isinstance(own, list) else [] if own is None else [own])}


def decoded(
    tokenizer: PreTrainedTokenizerBase, end_ids: set[int], ids: list[Ids], logprobs: list[list[float]] | None = None
) -> Iterator[Response]:
    """Responses to one prompt. logprobs: one for each token, in nats."""
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    # Arrays take an eighth of a list's memory, and numbers of fp32 lose nothing.
    compact = [None] * len(ids) if logprobs is None else [array("f", values) for values in logprobs]
    for response_ids, text, values in zip(ids, texts, compact, strict=True):
        yield Response(response_ids, text, response_ids[-1] in end_ids, values)
