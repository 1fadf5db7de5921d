"""Responses from transformers' `generate`: prompts padded on the left, a batch at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fastp3o.models.packed_model import PackedModel
from fastp3o.rollouts.rollouts import Rollouts


class TransformersSampler:
    """A Sampler. A batch is sampled until the longest of its responses ends.

    max_response_tokens: longest response. batch_size: prompts sampled at once, with all their responses.
    """

    def __init__(
        self,
        policy: PackedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_response_tokens: int,
        batch_size: int,
    ):
        self.policy, self.tokenizer = policy, tokenizer
        self.max_response_tokens, self.batch_size = max_response_tokens, batch_size

    def __call__(
        self, prompts: list[str], prompt_ids: list[list[int]], *, responses_per_prompt: int, seed: int
    ) -> Rollouts:
        torch.manual_seed(seed)
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
                )
                response_ids += [
                    ids[p * responses_per_prompt : (p + 1) * responses_per_prompt] for p in range(len(batch))
                ]
        return Rollouts(
            prompts=prompts,
            prompt_ids=prompt_ids,
            responses=[self.tokenizer.batch_decode(group, skip_special_tokens=True) for group in response_ids],
            response_ids=response_ids,
            finished=[[ids[-1] in end_ids for ids in group] for group in response_ids],
        )


@torch.no_grad()
def generate(
    policy: PreTrainedModel,
    prompt_ids: list[list[int]],
    *,
    responses_per_prompt: int,
    max_response_tokens: int,
    end_ids: set[int],
    pad_token_id: int,
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
            temperature=1.0,
            top_p=1.0,
            top_k=0,
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
    own_config, was_training = model.generation_config, policy.training
    model.generation_config = GenerationConfig()
    policy.eval()
    try:
        with policy.with_own_attention():
            yield model
    finally:
        model.generation_config = own_config
        policy.train(was_training)


def end_of_sequence_ids(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokenizer's end-of-sequence and those that the checkpoint stops at (a chat model's end of turn)."""
    own = policy.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(own if isinstance(own, list) else [] if own is None else [own])}


def cut_after_end(ids: list[int], end_ids: set[int]) -> list[int]:
    for position, token in enumerate(ids):
        if token in end_ids:
            return ids[: position + 1]
    return ids
