"""Responses from transformers' `generate`: prompts padded on the left, a batch at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fastp3o.models.packed_model import PackedModel, evaluation_mode
from fastp3o.rollouts.end_of_sequence import cut_after_end, end_of_sequence_ids
from fastp3o.rollouts.rollouts import Rollouts, decode_rollouts
from fastp3o.rollouts.sampling_settings import POLICY_ITSELF, SamplingSettings


class TransformersSampler:
    """A Sampler. A batch is sampled until the longest of its responses ends, and batches of another size give other
    responses.

    max_response_tokens: longest response. batch_size: prompts sampled at once, with all their responses.
    """

    def __init__(
        self,
        policy: PackedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_response_tokens: int,
        batch_size: int,
        settings: SamplingSettings = POLICY_ITSELF,
    ):
        self.policy, self.tokenizer = policy, tokenizer
        self.max_response_tokens, self.batch_size, self.settings = max_response_tokens, batch_size, settings

    def __call__(
        self,
        prompts: list[str],
        prompt_ids: list[list[int]],
        numbers: Sequence[int] | None = None,
        *,
        responses_per_prompt: int,
        seed: int,
    ) -> Rollouts:
        # Processes differ in the number of their first prompt.
        torch.manual_seed(seed + (numbers[0] if numbers else 0))
        end_ids = end_of_sequence_ids(self.policy.model, self.tokenizer)
        response_ids: list[list[list[int]]] = []
        batches = range(0, len(prompt_ids), self.batch_size)
        with sampling_mode(self.policy) as model:
            for first in tqdm(batches, desc="sampling", unit="batch", leave=False, disable=len(batches) < 4):
                batch = prompt_ids[first : first + self.batch_size]
                ids = generate(
                    model,
                    batch,
                    responses_per_prompt=responses_per_prompt,
                    max_response_tokens=self.max_response_tokens,
                    end_ids=end_ids,
                    pad_token_id=self.tokenizer.pad_token_id,
                    settings=self.settings,
                )
                response_ids += [
                    ids[p * responses_per_prompt : (p + 1) * responses_per_prompt] for p in range(len(batch))
                ]
        return decode_rollouts(self.tokenizer, end_ids, prompts, prompt_ids, response_ids)


@torch.no_grad()
def generate(
    policy: PreTrainedModel,
    prompt_ids: list[list[int]],
    *,
    responses_per_prompt: int,
    max_response_tokens: int,
    end_ids: set[int],
    pad_token_id: int,
    settings: SamplingSettings = POLICY_ITSELF,
) -> list[list[int]]:
    """Token ids of P K responses, those to a prompt adjacent, each cut after its first end-of-sequence."""
    width = max(map(len, prompt_ids))
    input_ids = torch.tensor([[pad_token_id] * (width - len(ids)) + ids for ids in prompt_ids])
    attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids])
    output = cast(Any, policy).generate(
        input_ids=input_ids.to(policy.device),
        attention_mask=attention_mask.to(policy.device),
        generation_config=GenerationConfig(
            do_sample=True,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p or None,
            num_return_sequences=responses_per_prompt,
            max_new_tokens=max_response_tokens,
            eos_token_id=sorted(end_ids),
            pad_token_id=pad_token_id,
        ),
    )
    return [cut_after_end(ids, end_ids) for ids in output[:, width:].tolist()]


@contextmanager
def sampling_mode(policy: PackedModel) -> Iterator[PreTrainedModel]:
    """Out of training mode, in which gradient checkpointing forbids the cache, and without the sampling settings that
    came with the checkpoint: transformers merges them into those it is given.
    """
    model = policy.model
    own_config = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        with evaluation_mode(policy), policy.with_own_attention():
            yield model
    finally:
        model.generation_config = own_config
