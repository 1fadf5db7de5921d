"""What every sampler is. Training, evaluations and win rates know no other."""

from typing import Protocol

from fastp3o.rollouts.rollouts import Rollouts


class Sampler(Protocol):
    """Samples responses from a policy, at temperature 1 from the whole vocabulary, within limits of its own."""

    def __call__(
        self, prompts: list[str], prompt_ids: list[list[int]], *, responses_per_prompt: int, seed: int
    ) -> Rollouts:
        """Equal seeds give equal responses of equal policies."""
