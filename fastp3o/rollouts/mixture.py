"""Responses from a geometric mixture of two policies, π^(1 − β) π_other^β at each token (arXiv 2312.00886)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastp3o.errors import UserError
from fastp3o.models.packable import within_vocabulary
from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.layout import Ids
from fastp3o.rollouts.cache import Cache
from fastp3o.rollouts.engine import Engine
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.logits import head_logits
from fastp3o.rollouts.prefill import layer_shapes, prefill
from fastp3o.rollouts.rollouts import Rollouts
from fastp3o.rollouts.room import LayerShape, Room
from fastp3o.rollouts.sampler import Sampler
from fastp3o.rollouts.trial import reason_against
from fastp3o_kernels.decoding import Slots

# Sets responses of the mixture apart from those of the policy with the same seed.
MIXTURE = 0x6D697874757265


class MixtureEngine(Engine):
    """Two policies over the same tokens, each with keys and values of its own.

    other: with the same vocabulary. weight: β.
    """

    def __init__(
        self,
        policy: PackedModel,
        shapes: dict[int, LayerShape],
        room: Room,
        other: PackedModel,
        other_shapes: dict[int, LayerShape],
        weight: float,
        *given: Any,
        **options: Any,
    ):
        super().__init__(policy, shapes, room, *given, **options)
        self.other, self.other_head, self.weight = other, other.head(), weight
        self.other_cache = Cache(other_shapes, room, policy.model.device)

    def prefill(self, prompts: Sequence[Ids]) -> None:
        super().prefill(prompts)
        self.other_cache.take_memory()
        prefill(self.other, self.other_cache, prompts, pad=self.static, tokens_per_row=self.tokens_per_row)

    def logits(self, slots: Slots) -> Tensor:
        logits = super().logits(slots)
        self.other_cache.slots = slots
        positions = (slots.prompt_lengths + slots.steps)[None]
        hidden = self.other.hidden_states(self.queue.tokens[None], positions, cache=self.other_cache)
        # Logits are log-probabilities but for a number a token, which the softmax behind takes out.
        return torch.lerp(logits, head_logits(hidden, self.other_head), self.weight)

    def tensors(self) -> list[Tensor]:
        model = self.other.model
        return [*super().tensors(), *model.parameters(), *model.buffers(), *self.other_cache.tensors()]

    def release_memory(self) -> None:
        super().release_memory()
        self.other_cache.release_memory()

    def keep_slots(self, kept: Tensor) -> None:
        super().keep_slots(kept)
        self.other_cache.keep_slots(kept)


class MixtureSampler(EngineSampler):
    """A Sampler from the mixture. Its log-probabilities are the mixture's."""

    def __init__(self, policy: PackedModel, tokenizer: Any, other: PackedModel, weight: float, **options: Any):
        super().__init__(policy, tokenizer, **options)
        self.other, self.weight = other, weight
        self.other_shapes: dict[int, LayerShape] = {}

    def try_policy(self) -> None:
        """Raises ValueError where the engine cannot decode both."""
        for policy, shapes in ((self.policy, self.shapes), (self.other, self.other_shapes)):
            shapes |= layer_shapes(policy, *within_vocabulary(policy.model, [3]))
            if reason := reason_against(policy, shapes):
                name = type(policy.model).__name__
                raise UserError(
                    f"a mixture of two policies needs ones that the engine can decode, not {name}: {reason}"
                )

    def new_engine(self, room: Room, end_ids: set[int]) -> Engine:
        given = self.other, self.other_shapes, self.weight, end_ids, self.settings
        return MixtureEngine(self.policy, self.shapes, room, *given, graph=self.graph, compiles=self.compiles)

    def bytes_per_token(self) -> int:
        return super().bytes_per_token() + sum(shape.bytes_per_token for shape in self.other_shapes.values())


class PartlyFromMixture:
    """A Sampler: the last responses of each prompt are the mixture's.

    count: how many; all others are the policy's.
    """

    def __init__(self, policy_sampler: Sampler, mixture_sampler: Sampler, count: int):
        self.policy_sampler, self.mixture_sampler, self.count = policy_sampler, mixture_sampler, count

    def __call__(
        self,
        prompts: list[str],
        prompt_ids: list[list[int]],
        numbers: Sequence[int] | None = None,
        *,
        responses_per_prompt: int,
        seed: int,
    ) -> Rollouts:
        given = prompts, prompt_ids, numbers
        own = responses_per_prompt - self.count
        mixed = self.mixture_sampler(*given, responses_per_prompt=self.count, seed=seed ^ MIXTURE)
        if own == 0:
            return replace(mixed, logprobs=None)
        plain = self.policy_sampler(*given, responses_per_prompt=own, seed=seed)
        both: dict[str, Any] = {
            name: [[*first, *second] for first, second in zip(getattr(plain, name), getattr(mixed, name), strict=True)]
            for name in ("responses", "response_ids", "finished")
        }
        return replace(plain, **both, logprobs=None)
