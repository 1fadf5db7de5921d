"""Responses to prompts, sampled from the policy: two to each prompt in training.

P prompts, K responses to each; response k of prompt p is sequence p * K + k of S = P * K.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fastp3o.models.packed_model import PackedModel


@dataclass
class Rollouts:
    """S sampled responses, each with its prompt; responses to the same prompt are adjacent."""

    prompt_ids: list[list[int]]
    response_ids: list[list[int]]  # the end-of-sequence included where it was sampled
    prompts: list[str]
    responses: list[str]  # without special tokens
    finished: list[bool]  # whether the response ended with an end-of-sequence

    def __len__(self) -> int:
        return len(self.response_ids)

    def __getitem__(self, part: slice) -> "Rollouts":
        return Rollouts(**{name: values[part] for name, values in vars(self).items()})


def sample(
    policy: PackedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    prompt_ids: list[list[int]],
    *,
    responses_per_prompt: int,
    max_response_tokens: int,
    batch_size: int,
    seed: int,
) -> Rollouts:
    """Samples responses at temperature 1 from the whole vocabulary; `batch_size` counts prompts.

    Equal seeds give equal responses of equal policies.
    """
    torch.manual_seed(seed)
    end_ids = end_of_sequence_ids(policy.model, tokenizer)
    response_ids = []
    batches = range(0, len(prompt_ids), batch_size)
    with sampling_mode(policy) as model:
        for first in tqdm(batches, desc="sampling", unit="batch", leave=False, disable=len(batches) < 4):
            response_ids += generate(
                model,
                prompt_ids[first : first + batch_size],
                responses_per_prompt=responses_per_prompt,
                max_response_tokens=max_response_tokens,
                end_ids=end_ids,
                pad_token_id=tokenizer.pad_token_id,
            )
    return Rollouts(
        prompt_ids=repeat(prompt_ids, responses_per_prompt),
        response_ids=response_ids,
        prompts=repeat(prompts, responses_per_prompt),
        responses=tokenizer.batch_decode(response_ids, skip_special_tokens=True),
        finished=[ids[-1] in end_ids for ids in response_ids],
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
    """Token ids of the responses, each cut after its first end-of-sequence."""
    width = max(map(len, prompt_ids))
    input_ids = torch.tensor([[pad_token_id] * (width - len(ids)) + ids for ids in prompt_ids])
    attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids])
    output = policy.generate(
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
        with policy.as_transformers_has_it():
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


def repeat(values: list, times: int) -> list:
    return [value for value in values for _ in range(times)]
