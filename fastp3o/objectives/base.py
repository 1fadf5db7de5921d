"""The interface of objectives: packed rows with rewards and log-probs in, loss and metrics out.

Shapes: P prompts with K responses each, N labeled tokens of a packed row, n tokens of some of its
prompts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fastp3o.objectives.kl_coefficient import KLCoefficient
from fastp3o.packing.packed_row import PackedRow
from fastp3o.rewards.scaling import Scaler
from fastp3o_kernels import Groups, Head, linear_loss, sequence_logprobs

if TYPE_CHECKING:  # types alone: their import takes seconds
    from torch.distributed.checkpoint.stateful import Stateful

    from fastp3o.models.packed_model import PackedModel


# --- the rows of a step ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Microbatch:
    """A packed row of rollouts with everything that a loss takes."""

    row: PackedRow
    # [P, K] fp32, scaled; [P, K, K] where the reward compares and the objective takes that
    # (`takes_pairs`)
    rewards: Tensor
    # [N] fp32, by the policy before the update, or by what sampled (`--old_logprobs`).
    old_token_logprobs: Tensor
    ref_token_logprobs: Tensor  # [N] fp32, by the reference; zeros without one
    # [N] fp32: the update's first loss leaves the policy's log-probs here, NaN until then. None:
    # nothing needs that. If it is `old_token_logprobs`, they have no pass of their own, since the
    # update makes one step.
    noted_token_logprobs: Tensor | None = field(default=None, kw_only=True)
    # [N] fp32, by what sampled, if needed.
    sampler_token_logprobs: Tensor | None = field(default=None, kw_only=True)
    # [P, K] bool, takes part in the loss; None: all do.
    loss_mask: Tensor | None = field(default=None, kw_only=True)
    # [N] fp32, scaled: parts of `rewards` that come at these tokens; None: all of it comes at a
    # response's last
    token_rewards: Tensor | None = field(default=None, kw_only=True)
    # Added by `Objective.prepare`.
    prepared: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)

    @cached_property
    def old_logprobs(self) -> Tensor:
        """[P, K] fp32: sums over a response's tokens."""
        return self.response_sums(self.old_token_logprobs)

    @cached_property
    def ref_logprobs(self) -> Tensor:
        """[P, K] fp32."""
        return self.response_sums(self.ref_token_logprobs)

    @property
    def policy_token_logprobs(self) -> Tensor:
        """[N] fp32, by the policy before the update; with `--old_logprobs sampler` only in the
        first step's.
        """
        return (
            self.old_token_logprobs
            if self.noted_token_logprobs is None
            else self.noted_token_logprobs
        )

    @property
    def old_are_noted(self) -> bool:
        """Whether the first loss gives the old log-probs: to it they are its own, and every ratio
        is 1.
        """
        return self.noted_token_logprobs is self.old_token_logprobs

    def note(self, token_logprobs: Tensor) -> None:
        """Keeps the policy's log-probs [N] as the first loss has computed them, if anything needs
        that.
        """
        if self.noted_token_logprobs is not None:
            self.noted_token_logprobs.copy_(token_logprobs.detach())

    def response_sums(self, values: Tensor) -> Tensor:
        """[N] -> [P, K]."""
        return sequence_logprobs(values, self.row.cu_seqlens).view(self.rewards.shape[:2])

    def sampler_log_ratios(self) -> Tensor:
        """[N] fp32: log π_old − log μ of each token, μ what sampled it. Raises ValueError if log μ
        is not known.
        """
        return self.old_token_logprobs - self.known_sampler_logprobs()

    def sampler_logprobs(self) -> Tensor:
        """[P, K] fp32: log μ of each response, such that its difference to the old log-prob rounds
        little.
        """
        if self.old_are_noted:
            return self.response_sums(self.known_sampler_logprobs())
        return self.old_logprobs - self.response_sums(self.sampler_log_ratios())

    def known_sampler_logprobs(self) -> Tensor:
        """[N] fp32: log μ of each token. Raises ValueError if it is not known."""
        if self.sampler_token_logprobs is None:
            raise ValueError(
                "importance weights need the log-probs of what sampled, and these rollouts have none"
            )
        return self.sampler_token_logprobs


def masked_tokens(row: PackedRow, loss_mask: Tensor | None) -> int:
    """Number of labeled tokens in responses that take part in a loss. loss_mask: [P, K] bool, on
    the CPU.
    """
    if loss_mask is None:
        return len(row.labels)
    return sum(compress(row.labeled_lengths, loss_mask.flatten().tolist()))


# The loss, 0-d, summed over the row and divided by its minibatch's divisor, and its metrics,
# detached. A metric whose name ends in `_max` is a maximum, 0-d. Any other is a sum and the number
# of things in it, [2].
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


def with_count(sums: Mapping[str, Tensor], count: Tensor | float) -> dict[str, Tensor]:
    """Metrics: sums, 0-d each, with the number of things in each of them, [2]."""
    if not sums:
        return {}
    values = torch.stack([*sums.values()]).detach()
    counts = (
        count.to(values).expand_as(values)
        if isinstance(count, Tensor)
        else torch.full_like(values, count)
    )
    return dict(zip(sums, torch.stack([values, counts], dim=1), strict=True))


Minibatches = list[list[Microbatch]]
SumOverProcesses = Callable[[Tensor], Tensor]


# --- objectives -----------------------------------------------------------------------------------


class Objective(ABC):
    """Updates the policy from rollouts with rewards, old and reference log-probs. scaler: scales
    rewards. kl: the weight of the KL to the reference, if it is a part of the state.
    reference_values: `Reference.map_rows` of the run's, for objectives that take more of it than
    log-probs. takes_pairs: whether rewards that compare come as differences of pairs, [P, K, K],
    rather than as row means of these.
    """

    scaler: Scaler
    takes_pairs: bool = False
    reference_values: Callable[
        [Sequence[PackedRow], Callable[["PackedModel", PackedRow], Tensor]], list[Tensor]
    ]
    kl: KLCoefficient | None = None

    @property
    def label(self) -> str:
        """Its name in lines of the log."""
        return type(self).__name__

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
        """Values that an update changes beside its optimizer steps, such as the KL's weight, as
        metrics by name.
        """
        return {} if self.kl is None or self.kl.target is None else {"kl_coef": self.kl.value}

    @property
    def reads_old_first(self) -> bool:
        """Whether something reads the old log-probs before an update's first loss, or that loss
        computes none.
        """
        return self.kl is not None and self.kl.target is not None

    def clip_range(self, length: float) -> float | None:
        """Clip range of the sequence's log-ratio at this length, None if it is not clipped."""
        return None

    def divisor(self, row: PackedRow, loss_mask: Tensor | None) -> int:
        """The share of a row in its minibatch's divisor: its prompts, unless the loss is a mean
        over something else. loss_mask: [P, K] bool, on the CPU; None for all.
        """
        return len(row.groups)

    def add_to(self, policy: "PackedModel") -> None:  # noqa: B027 - most add nothing
        """Adds modules that train with the policy, such as a critic."""

    def prepare(
        self, policy: nn.Module, minibatches: Minibatches, sum_over_processes: SumOverProcesses
    ) -> Minibatches:
        """Runs once an update, before its first optimizer step: adapts the KL's weight. Subclasses
        add tensors.
        """
        if self.kl is not None and self.kl.target is not None:
            self.kl.adapt(mean_kl(minibatches, sum_over_processes))
        return minibatches

    def conclude(  # noqa: B027 - most do nothing
        self, policy: nn.Module, minibatches: Minibatches, sum_over_processes: SumOverProcesses
    ) -> None:
        """Runs once an update, after its last optimizer step: looks at how far the policy has
        moved, or moves it.
        """

    @abstractmethod
    def loss(
        self,
        policy: nn.Module,
        microbatch: Microbatch,
        divisor: float | Tensor,
        *,
        first: bool = False,
    ) -> LossAndMetrics:
        """The loss of one microbatch, divided by the divisor of its minibatch, as a mean over the
        processes.

        first: at an update's first optimizer step, when the policy still is the one before the
        update. Then the loss leaves the policy's log-probs in `Microbatch.noted_token_logprobs`, if
        there is room for them.
        """


class GroupwiseObjective(Objective):
    """An objective whose loss is a plain function of the log-probs of each prompt's responses, in
    one pass of the head. outputs: further outputs of that pass for each token (`TokenOutputs`).
    sampler_ratio_cap: of the importance weights of losses (`truncated_ratios`); 0: losses have
    none.
    """

    outputs: tuple[str, ...] = ()
    sampler_ratio_cap: float = 0.0

    @property
    def reads_sampler(self) -> bool:
        """Whether the loss reads `sampler_tokens`."""
        return bool(self.sampler_ratio_cap)

    @abstractmethod
    def sums(self, groups: Groups) -> LossAndMetrics:
        """The loss of some prompts, summed, and its metrics.

        groups: has `old_tokens`, `ref_tokens` [n], `old`, `ref`, `rewards`, `loss_mask` [P, K] and
            `Microbatch.prepared`; if it `reads_sampler` also `sampler_tokens` [n], by what sampled.
        """

    def loss(
        self,
        policy: nn.Module,
        microbatch: Microbatch,
        divisor: float | Tensor,
        *,
        first: bool = False,
    ) -> LossAndMetrics:
        row, loss_mask = microbatch.row, microbatch.loss_mask
        if loss_mask is None:
            loss_mask = torch.ones(
                microbatch.rewards.shape[:2], dtype=torch.bool, device=microbatch.rewards.device
            )
        token_tensors = {"ref_tokens": microbatch.ref_token_logprobs}
        if self.reads_sampler:
            token_tensors["sampler_tokens"] = microbatch.known_sampler_logprobs()
        responses = {
            "ref": microbatch.ref_logprobs,
            "rewards": microbatch.rewards,
            "loss_mask": loss_mask,
        }
        objective: Callable[[Groups], LossAndMetrics] = self.sums
        if first and microbatch.old_are_noted:
            objective = on_policy(self.sums)
        else:
            token_tensors["old_tokens"] = microbatch.old_token_logprobs
            responses["old"] = microbatch.old_logprobs

        def head_loss(hidden: Tensor, head: Head) -> LossAndMetrics:
            return linear_loss(
                hidden,
                head,
                row.labels,
                row.cu_seqlens_on_host,
                objective,
                responses_per_group=loss_mask.shape[1],
                token_tensors=token_tensors,
                response_tensors={**responses, **microbatch.prepared},
                outputs=self.outputs,
                divisor=divisor,
                logprobs_out=microbatch.noted_token_logprobs if first else None,
            )

        return policy(row, row.labeled_at, head_loss)


# --- importance weights and the KL ----------------------------------------------------------------


def on_policy(sums: Callable[[Groups], LossAndMetrics]) -> Callable[[Groups], LossAndMetrics]:
    """`sums` of groups whose old log-probs are those that the loss has just computed."""

    def with_own_as_old(groups: Groups) -> LossAndMetrics:
        logprobs = groups.token_logprobs.detach()
        return sums(groups.having(old_tokens=logprobs, old=groups.sums(logprobs)))

    return with_own_as_old


def sampler_log_ratios(groups: Groups) -> Tensor:
    """[n]: log π_old − log μ of each token, μ what sampled it."""
    return groups["old_tokens"] - groups["sampler_tokens"]


def sampler_ratio_metrics(ratios: Tensor, cap: float) -> dict[str, Tensor]:
    """Values whose means are metrics, as many as there are importance weights: these, and whether
    they are capped.
    """
    return {"sampler_ratio_mean": ratios, "sampler_ratio_capped": (ratios >= cap).to(ratios.dtype)}


def mean_kl(minibatches: Minibatches, sum_over_processes: SumOverProcesses) -> float:
    """Mean of log π_old(y|x) − log π_ref(y|x) over the rollouts of all processes, in nats per
    response.
    """
    log_ratios = [
        batch.old_logprobs - batch.ref_logprobs for batch in chain.from_iterable(minibatches)
    ]
    sums = torch.stack(
        [torch.stack([part.sum(), part.new_full((), part.numel())]) for part in log_ratios]
    ).sum(0)
    total, count = sum_over_processes(sums).tolist()
    return total / count
