"""What every sampler is. Training, evaluations and win rates know no other."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from fastp3o.data.loading import column_values
from fastp3o.rollouts.rollouts import Rollouts


class Sampler(Protocol):
    """Samples responses from a policy, by default at temperature 1 from the whole vocabulary, within limits of its own.

    A policy that is served elsewhere is one more of these.
    """

    def __call__(
        self,
        prompts: list[str],
        prompt_ids: list[list[int]],
        numbers: Sequence[int] | None = None,
        *,
        responses_per_prompt: int,
        seed: int,
    ) -> Rollouts:
        """Equal seeds give equal responses of equal policies.

        numbers: of the prompts, among all that the processes sample with this seed; by default their places here.
        """


def sample(
    sampler: Sampler,
    examples: Mapping[str, list],
    numbers: Sequence[int] | None = None,
    *,
    responses_per_prompt: int,
    seed: int,
) -> Rollouts:
    """Responses to examples of `load_prompts`, whose further columns go with them. Arguments as of a Sampler."""
    prompts, prompt_ids = examples["prompt"], examples["prompt_ids"]
    rollouts = sampler(prompts, prompt_ids, numbers, responses_per_prompt=responses_per_prompt, seed=seed)
    return replace(rollouts, columns=column_values(examples))
