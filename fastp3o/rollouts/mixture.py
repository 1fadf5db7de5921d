"""Responses from a geometric mixture of two policies, π^(1 − β) π_other^β at each token (arXiv
2312.00886).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.packed_row import Ids
from fastp3o.rollouts.cache import LayerShape, Room
from fastp3o.rollouts.engine import Engine, head_logits, prefill
from fastp3o.rollouts.engine_sampler import EngineSampler, decodable_shapes
from fastp3o.rollouts.groups import Group, Prompt, Sampler
from fastp3o_kernels.decoding import Slots

# Sets responses of the mixture apart from those of the policy with the same seed.
MIXTURE = 0x6D697874757265


class MixtureEngine(Engine):
    """An engine of two policies with the same vocabulary. Each has its own keys and values of the
    same tokens. weight: β. Further arguments are an Engine's.
    """

    def __init__(
        self,
        other: PackedModel,
        other_shapes: dict[int, LayerShape],
        weight: float,
        *arguments: Any,
        **options: Any,
    ):
        super().__init__(*arguments, **options)
        self.other, self.other_head, self.weight = other, other.head(), weight
        self.other_cache = self.new_cache(other_shapes)
        self.caches.append(self.other_cache)

    def prefill(self, prompts: Sequence[Ids]) -> None:
        super().prefill(prompts)
        prefill(
            self.other,
            self.other_cache,
            prompts,
            pad=self.static,
            tokens_per_row=self.tokens_per_row,
        )

    def logits(self, slots: Slots) -> Tensor:
        logits = super().logits(slots)
        self.other_cache.begin_step(slots, self.queue.most_own_tokens)
        positions = (slots.prompt_lengths + slots.steps)[None]
        hidden = self.other.hidden_states(
            self.queue.tokens[None], positions, cache=self.other_cache
        )
        # Logits differ from log-probabilities by a number for each token, which the softmax after
        # it takes out.
        return torch.lerp(logits, head_logits(hidden, self.other_head), self.weight)

    def tensors(self) -> list[Tensor]:
        model = self.other.model
        return [*super().tensors(), *model.parameters(), *model.buffers()]


class MixtureSampler(EngineSampler):
    """A Sampler from the mixture, whose log-probabilities are the mixture's. options: an
    EngineSampler's.
    """

    def __init__(
        self,
        policy: PackedModel,
        tokenizer: PreTrainedTokenizerBase,
        other: PackedModel,
        weight: float,
        **options: Any,
    ):
        super().__init__(policy, tokenizer, **options)
        self.other, self.weight = other, weight
        self.other_shapes: dict[int, LayerShape] = {}

    def try_policy(self) -> None:
        self.shapes, self.other_shapes = decodable_shapes(self.policy), decodable_shapes(self.other)

    def new_engine(self, room: Room, end_ids: set[int]) -> Engine:
        return MixtureEngine(
            self.other,
            self.other_shapes,
            self.weight,
            self.policy,
            self.shapes,
            room,
            end_ids,
            self.settings,
        )

    def bytes_per_token(self) -> int:
        return super().bytes_per_token() + sum(
            shape.bytes_per_token for shape in self.other_shapes.values()
        )


def partly_from_mixture(policy_sampler: Sampler, mixture_sampler: Sampler, count: int) -> Sampler:
    """A sampler that draws the last `count` responses to each prompt from the mixture, the others
    from the policy.
    """

    def sample(prompts: list[Prompt], responses_per_prompt: int, seed: int) -> list[Group]:
        mixed = mixture_sampler(prompts, count, seed ^ MIXTURE)
        from_policy = responses_per_prompt - count
        plain = (
            policy_sampler(prompts, from_policy, seed)
            if from_policy
            else [Group(prompt, []) for prompt in prompts]
        )
        return [
            # The mixture's log-probs are not the policy's.
            Group(
                prompt, responses + [response._replace(logprobs=None) for response in from_mixture]
            )
            for (prompt, responses), (_, from_mixture) in zip(plain, mixed, strict=True)
        ]

    return sample
