"""What every sampler is. Training, evaluations and win rates know no other."""

from collections.abc import Sequence
from typing import Protocol

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
