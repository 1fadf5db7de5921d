"""What sets one algorithm apart from another in the training loop; everything else is the same for all."""

from typing import Protocol

from accelerate import Accelerator
from torch import Tensor, nn

from fastp3o.models.packed_model import PackedModel
from fastp3o.rewards.scaling import Scaler
from fastp3o.training.minibatches import Pairs


class Algorithm(Protocol):
    """An update of the policy from rollouts with rewards, old and reference log-probs.

    averages_tokens: whether the loss is a mean over response tokens, rather than over prompts.
    clip_range: of log-ratios of whole responses, which rounding must leave alone; None where there is none.
    scaler: what rewards go through.
    learning_rates: of submodules that the algorithm adds to the policy, by name.
    """

    averages_tokens: bool
    clip_range: float | None
    scaler: Scaler
    learning_rates: dict[str, float]

    def add_to(self, policy: PackedModel) -> None:
        """Adds what trains beside the policy."""

    def prepare(self, accelerator: Accelerator, policy: nn.Module, minibatches: list[list[Pairs]]) -> list[list[Pairs]]:
        """What is computed once a round, before the first step."""

    def loss(self, policy: nn.Module, pairs: Pairs) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one packed row, 0-d, and its metrics, 0-d and detached."""
