"""Responses from a policy that is spread over the processes."""

from collections.abc import Sequence

from fastp3o.models.packed_model import PackedModel
from fastp3o.models.whole_copy import WholeCopy
from fastp3o.rollouts.rollouts import Rollouts
from fastp3o.rollouts.sampler import Sampler


class GatheredSampler:
    """A Sampler. Each process gathers the weights once a call, and samples on its own, where they fit its memory.

    sampler: from the copy, which has the policy's weights in every call.
    """

    def __init__(self, sampler: Sampler, policy: PackedModel, copy: WholeCopy):
        self.sampler, self.policy, self.copy = sampler, policy, copy

    def __call__(
        self,
        prompts: list[str],
        prompt_ids: list[list[int]],
        numbers: Sequence[int] | None = None,
        *,
        responses_per_prompt: int,
        seed: int,
    ) -> Rollouts:
        with self.copy.gathered(self.policy):
            return self.sampler(prompts, prompt_ids, numbers, responses_per_prompt=responses_per_prompt, seed=seed)
