"""What every objective is: packed rows with rewards and log-probs in, loss and metrics out.

P prompts with K responses each and N scored tokens of a packed row.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

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
    metrics_weight: float = field(default=1.0, kw_only=True)  # of its metrics, see LossAndMetrics
    response_share: float = field(default=1.0, kw_only=True)  # its share of what `Objective.units` counts
    counted: Tensor | None = field(default=None, kw_only=True)  # [P, K] bool, what takes part in the loss; None: all

    def counted_tokens(self) -> int:
        """How many take part in the loss."""
        return counted_tokens(self.row, self.counted)

    def counted_responses(self) -> Tensor:
        """[P, K] bool: which take part in the loss."""
        return torch.ones_like(self.rewards, dtype=torch.bool) if self.counted is None else self.counted


def counted_tokens(row: PackedRow, counted: Tensor | None) -> int:
    """Scored tokens of a row's responses that take part in a loss; counted: [P, K] bool, None for all."""
    if counted is None:
        return len(row.labels)
    takes_part = zip(row.scored_lengths, counted.flatten().tolist(), strict=True)
    return sum(length for length, counts in takes_part if counts)


# A loss, 0-d, and metrics of it, 0-d and detached: names that end in `_max` are maxima, the others means over what
# counts, tokens where the loss averages them or else responses, and 0 where nothing does.
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]
SumOverProcesses = Callable[[Tensor], Tensor]


class Objective(ABC):
    """An update of the policy from rollouts with rewards, old and reference log-probs.

    averages_tokens: whether the loss is a mean over response tokens, rather than over prompts.
    scaler: what rewards go through.
    """

    averages_tokens: bool = False
    scaler: Scaler

    @property
    def learning_rates(self) -> Mapping[str, float]:
        """Of submodules that the objective adds to the policy, by name."""
        return {}

    @property
    def parts(self) -> dict[str, Stateful]:
        """What of it changes from update to update, by the names that these have in a state."""
        return {"reward_scaling": self.scaler}

    @property
    def adapted(self) -> dict[str, float]:
        """Settings that an update changes, by name, to be reported."""
        return {}

    def clip_range(self, length: float) -> float | None:
        """Of log-ratios of whole responses of so many tokens, which rounding must leave alone; None where there is
        none.
        """
        return None

    def units(self, counted: Tensor) -> Tensor:
        """Over how many metrics are means where the loss does not average tokens, 0-d: of the responses that count,
        [P, K] bool, or of what they make together.
        """
        return counted.sum()

    def add_to(self, policy: PackedModel) -> None:  # noqa: B027 - most add nothing
        """Adds what trains beside the policy, such as a critic."""

    def prepare(
        self, policy: nn.Module, minibatches: list[list[Microbatch]], sum_over_processes: SumOverProcesses
    ) -> list[list[Microbatch]]:
        """What is computed once an update, before the first optimizer step."""
        return minibatches

    @abstractmethod
    def loss(self, policy: nn.Module, microbatch: Microbatch, *, on_policy: bool = False) -> LossAndMetrics:
        """The loss of one microbatch. on_policy: no optimizer step has been made since its old log-probs."""
