"""Responses from transformers' `generate`: prompts padded on the left, a batch at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fastp3o.models.packed_model import PackedModel, evaluation_mode
from fastp3o.packing.packed_row import Ids
from fastp3o.rollouts.groups import POLICY_ITSELF, Ends, Group, Prompt, SamplingSettings


class TransformersSampler:
    """A Sampler. A batch is sampled until its longest response ends; another batch size gives other
    responses. max_response_tokens: longest response. batch_size: prompts sampled at once, with all
    their responses.
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
        self.ends = Ends(policy.model, tokenizer, settings.stops)
        self.max_response_tokens = max_response_tokens
        self.batch_size = batch_size
        self.settings = settings

    def __call__(self, prompts: list[Prompt], responses_per_prompt: int, seed: int) -> list[Group]:
        # Processes differ in the number of their first prompt.
        torch.manual_seed(seed + prompts[0].number)
        groups: list[Group] = []
        batches = range(0, len(prompts), self.batch_size)
        with sampling_mode(self.policy) as model:
            for first in tqdm(
                batches,
                desc="sampling",
                unit="batch",
                leave=False,
                disable=len(batches) < 4 or None,
            ):
                batch = prompts[first : first + self.batch_size]
                ids = generate(
                    model,
                    [prompt.ids for prompt in batch],
                    responses_per_prompt=responses_per_prompt,
                    max_response_tokens=self.max_response_tokens,
                    end_ids=self.ends.ids,
                    pad_token_id=self.tokenizer.pad_token_id,
                    settings=self.settings,
                    temperature=self.policy.temperature,
                )
                for p, prompt in enumerate(batch):
                    responses = ids[p * responses_per_prompt : (p + 1) * responses_per_prompt]
                    groups.append(
                        Group(
                            prompt,
                            list(self.ends.responses(responses, prompts=[prompt] * len(responses))),
                        )
                    )
        return groups


@torch.no_grad()
def generate(
    policy: PreTrainedModel,
    prompt_ids: list[Ids],
    *,
    responses_per_prompt: int,
    max_response_tokens: int,
    end_ids: set[int],
    pad_token_id: int,
    settings: SamplingSettings = POLICY_ITSELF,
    temperature: float = 1.0,
) -> list[Ids]:
    """Token ids of P K responses, those of one prompt adjacent, each cut after its first
    end-of-sequence.
    """
    width = max(map(len, prompt_ids))
    input_ids = torch.tensor([[pad_token_id] * (width - len(ids)) + ids for ids in prompt_ids])
    attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids])
    output = cast(Any, policy).generate(
        input_ids=input_ids.to(policy.device),
        attention_mask=attention_mask.to(policy.device),
        generation_config=GenerationConfig(
            do_sample=True,
            temperature=temperature,
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


def cut_after_end(ids: Ids, end_ids: set[int]) -> Ids:
    end = next((position for position, token in enumerate(ids) if token in end_ids), len(ids))
    return ids[: end + 1]


@contextmanager
def sampling_mode(policy: PackedModel) -> Iterator[PreTrainedModel]:
    """Leaves training mode, in which gradient checkpointing forbids the cache, and hides the
    sampling settings that came with the checkpoint: transformers merges them into those it is
    given.
    """
    model = policy.model
    config = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        with evaluation_mode(policy), policy.with_own_attention():
            yield model
    finally:
        model.generation_config = config
