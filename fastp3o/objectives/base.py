"""The interface of objectives: packed rows with rewards and log-probs in, loss and metrics out.

Shapes: P prompts with K responses each, N labelled tokens of a packed row, n tokens of some of its prompts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fastp3o.objectives.kl_coefficient import KLCoefficient
from fastp3o.packing.packed_row import PackedRow
from fastp3o.rewards.scaling import Scaler
from fastp3o_kernels import Groups, Head, linear_loss

if TYPE_CHECKING:  # types alone: their import takes seconds
    from torch.distributed.checkpoint.stateful import Stateful

    from fastp3o.models.packed_model import PackedModel


@dataclass(frozen=True)
class Microbatch:
    """A packed row of rollouts with everything that a loss takes."""

    row: PackedRow
    rewards: Tensor  # [P, K] fp32, scaled
    old_token_logprobs: Tensor  # [N] fp32, by the policy before the update, or by what sampled (`--old_logprobs`)
    ref_token_logprobs: Tensor  # [N] fp32, by the reference
    old_logprobs: Tensor  # [P, K] fp32, sums over a response's tokens
    ref_logprobs: Tensor  # [P, K] fp32
    weight: float  # the loss's, so that a minibatch's losses add up to the mean over all processes
    metrics_weight: float = field(default=1.0, kw_only=True)  # the metrics', see LossAndMetrics
    response_share: float = field(default=1.0, kw_only=True)  # its share of the minibatch's `Objective.metric_count`
    sampler_token_logprobs: Tensor | None = field(default=None, kw_only=True)  # [N] fp32, by what sampled, if needed
    counted: Tensor | None = field(default=None, kw_only=True)  # [P, K] bool, takes part in the loss; None: all do
    token_count: int | None = field(default=None, kw_only=True)  # tokens that take part, where reading `counted` waits
    prepared: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)  # added by `Objective.prepare`

    def counted_tokens(self) -> int:
        """Number of tokens that take part in the loss."""
        return counted_tokens(self.row, self.counted) if self.token_count is None else self.token_count

    def sampler_log_ratios(self) -> Tensor:
        """[N] fp32: log π_old − log μ of each token, μ what sampled it. Raises ValueError if log μ is not known."""
        if self.sampler_token_logprobs is None:
            raise ValueError("importance weights need the log-probs of what sampled, and these rollouts have none")
        return self.old_token_logprobs - self.sampler_token_logprobs

    def counted_responses(self) -> Tensor:
        """[P, K] bool: the responses that take part in the loss."""
        return torch.ones_like(self.rewards, dtype=torch.bool) if self.counted is None else self.counted


def counted_tokens(row: PackedRow, counted: Tensor | None) -> int:
    """Number of labelled tokens in responses that take part in a loss. counted: [P, K] bool, None for all."""
    if counted is None:
        return len(row.labels)
    takes_part = zip(row.labelled_lengths, counted.flatten().tolist(), strict=True)
    return sum(length for length, counts in takes_part if counts)


# The loss, 0-d, and its metrics, 0-d and detached. A metric whose name ends in `_max` is a maximum. Any other is a mean
# over the tokens that count if the loss averages tokens, else over `Objective.metric_count`; 0 if nothing counts.
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]
SumOverProcesses = Callable[[Tensor], Tensor]


class Objective(ABC):
    """Updates the policy from rollouts with rewards, old and reference log-probs.

    averages_tokens: the loss is a mean over response tokens; otherwise it is a mean over prompts.
    scaler: scales rewards. kl: the weight of the KL to the reference, if it is a part of the state.
    """

    averages_tokens: bool = False
    scaler: Scaler
    kl: KLCoefficient | None = None

    @property
    def learning_rates(self) -> Mapping[str, float]:
        """Learning rates of the submodules that the objective adds to the policy, by name."""
        return {}

    @property
    def stateful_parts(self) -> "dict[str, Stateful]":
        """The parts that change from update to update, by their names in a saved state."""
        return {"reward_scaling": self.scaler} | ({} if self.kl is None else {"kl_coef": self.kl})

    @property
    def adaptive_metrics(self) -> dict[str, float]:
        """The settings that an update changes, as metrics by name."""
        return {} if self.kl is None or self.kl.target is None else {"kl_coef": self.kl.value}

    def clip_range(self, length: float) -> float | None:
        """Clip range of the sequence's log-ratio at this length, None if it is not clipped."""
        return None

    def metric_count(self, counted: Tensor) -> Tensor:
        """Number of responses, or pairs, that metrics average over when the loss does not average tokens, 0-d.

        counted: [P, K] bool, the responses that take part in the loss.
        """
        return counted.sum()

    def add_to(self, policy: "PackedModel") -> None:  # noqa: B027 - most add nothing
        """Adds modules that train with the policy, such as a critic."""

    def prepare(
        self, policy: nn.Module, minibatches: list[list[Microbatch]], sum_over_processes: SumOverProcesses
    ) -> list[list[Microbatch]]:
        """Runs once an update, before its first optimizer step: adapts the KL's weight. Subclasses add tensors."""
        if self.kl is not None and self.kl.target is not None:
            self.kl.adapt(mean_kl(minibatches, sum_over_processes))
        return minibatches

    def conclude(  # noqa: B027 - most look at nothing
        self, policy: nn.Module, minibatches: list[list[Microbatch]], sum_over_processes: SumOverProcesses
    ) -> None:
        """Runs once an update, after its last optimizer step: looks at how far the policy has moved."""

    @abstractmethod
    def loss(self, policy: nn.Module, microbatch: Microbatch) -> LossAndMetrics:
        """The loss of one microbatch."""

    def first_loss(self, policy: nn.Module, microbatch: Microbatch) -> LossAndMetrics:
        """The loss at an update's first optimizer step, when the policy still is the one before the update."""
        return self.loss(policy, microbatch)


class GroupwiseObjective(Objective):
    """An objective whose loss is a plain function of the log-probs of each prompt's responses, in one pass of the head.

    outputs: further outputs of that pass for each token (`TokenOutputs`). sampler_ratio_cap: of the importance weights
    of losses (`truncated_ratios`); 0: losses have none.
    """

    outputs: tuple[str, ...] = ()
    sampler_ratio_cap: float = 0.0

    @abstractmethod
    def sums(self, groups: Groups) -> LossAndMetrics:
        """Loss and metrics of some prompts, each summed over what it averages.

        groups: has `old_tokens`, `ref_tokens` [n], `old`, `ref`, `rewards`, `counted` [P, K] and `Microbatch.prepared`;
            with a `sampler_ratio_cap` also `sampler_log_ratios` [n], log π_old − log μ, μ what sampled.
        """

    def loss(self, policy: nn.Module, microbatch: Microbatch) -> LossAndMetrics:
        row, counted = microbatch.row, microbatch.counted_responses()
        tokens = max(1, microbatch.counted_tokens()) if self.averages_tokens else None
        count = tokens or self.metric_count(counted).clamp(min=1)
        tokens_known = {"old_tokens": microbatch.old_token_logprobs, "ref_tokens": microbatch.ref_token_logprobs}
        if self.sampler_ratio_cap:
            tokens_known["sampler_log_ratios"] = microbatch.sampler_log_ratios()
        responses = {
            "old": microbatch.old_logprobs,
            "ref": microbatch.ref_logprobs,
            "rewards": microbatch.rewards,
            "counted": counted,
            **microbatch.prepared,
        }

        def head_loss(hidden: Tensor, head: Head) -> LossAndMetrics:
            return linear_loss(
                hidden,
                head,
                row.labels,
                row.cu_seqlens_on_host,
                self.sums,
                responses_per_group=counted.shape[1],
                token_tensors=tokens_known,
                response_tensors=responses,
                outputs=self.outputs,
                divisor=tokens or len(counted),
            )

        loss, metrics = policy(row, row.labelled_at, head_loss)
        return loss, {name: metric / count for name, metric in metrics.items()}


def sampler_ratio_metrics(ratios: Tensor, cap: float) -> dict[str, Tensor]:
    """Values whose means are metrics, as many as there are importance weights: these, and whether they are capped."""
    return {"sampler_ratio_mean": ratios, "sampler_ratio_capped": (ratios >= cap).to(ratios.dtype)}


def mean_kl(minibatches: list[list[Microbatch]], sum_over_processes: SumOverProcesses) -> float:
    """Mean of log π_old(y|x) − log π_ref(y|x) over the rollouts of all processes, in nats per response."""
    log_ratios = [batch.old_logprobs - batch.ref_logprobs for batch in chain.from_iterable(minibatches)]
    sums = torch.stack([torch.stack([part.sum(), part.new_full((), part.numel())]) for part in log_ratios]).sum(0)
    total, count = sum_over_processes(sums).tolist()
    return total / count
