"""What every objective is: packed rows with rewards and log-probs in, loss and metrics out.

P prompts with K responses each and N scored tokens of a packed row.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.packed_row import PackedRow
from fastp3o.rewards.scaling import Scaler


@dataclass(frozen=True)
class Microbatch:
    """A packed row of rollouts with all that a loss takes."""

    row: PackedRow
    rewards: Tensor  # [P, K] fp32, scaled
    old_token_logprobs: Tensor  # [N] fp32, of the policy that sampled
    ref_token_logprobs: Tensor  # [N] fp32, of the reference
    old_logprobs: Tensor  # [P, K] fp32, sums over a response's tokens
    ref_logprobs: Tensor  # [P, K] fp32
    weight: float  # of its loss, so that a minibatch's losses add up to the mean over all processes
    prompt_share: float = field(default=1.0, kw_only=True)  # what weight is where a loss averages prompts


# A loss, 0-d, and metrics of it, 0-d and detached; names that end in `_max` are maxima, the others means.
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]
SumOverProcesses = Callable[[Tensor], Tensor]


class Objective(Protocol):
    """An update of the policy from rollouts with rewards, old and reference log-probs.

    averages_tokens: whether the loss is a mean over response tokens, rather than over prompts.
    clip_range: of log-ratios of whole responses, which rounding must leave alone; None where there is none.
    scaler: what rewards go through.
    learning_rates: of submodules that the objective adds to the policy, by name.
    """

    learning_rates: dict[str, float]

    @property
    def averages_tokens(self) -> bool: ...
    @property
    def clip_range(self) -> float | None: ...
    @property
    def scaler(self) -> Scaler: ...

    def add_to(self, policy: PackedModel) -> None:
        """Adds what trains beside the policy."""

    def prepare(
        self, policy: nn.Module, minibatches: list[list[Microbatch]], sum_over_processes: SumOverProcesses
    ) -> list[list[Microbatch]]:
        """What is computed once an update, before the first optimizer step."""

    def loss(self, policy: nn.Module, microbatch: Microbatch) -> LossAndMetrics:
        """The loss of one microbatch."""
