"""A learning rate that follows how far the steps of an update move the policy (`--kl_per_update`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fastp3o.objectives.base import Microbatch, Minibatches
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.runtime.processes import sum_over_processes
from fastp3o.training.microbatches import policy_logprobs
from fastp3o_kernels.losses import step_kl

CHANGE = 4.0  # the most that an update multiplies or divides the rate by
FIRST_CHANGE = CHANGE**8  # the same of an update that tests rates
# After the first updates that had a gradient the rate rises by RISE at most: a policy that gets
# worse has more ties, so that its updates move less, and a rate that followed them at once would
# make an end of it.
FINDING, RISE = 10, 1.1
# Where rounding explains less than this share of what an update has moved, nothing is taken off.
NEGLIGIBLE = 0.01


# --- what goes from update to update --------------------------------------------------------------


@dataclass
class Search:
    """The state of the search for a rate, from update to update; saved with the run.

    given: the rate that the search began at. lessons: updates that had a gradient. hidden: whether
    rounding has hidden what the last of the first ones moved. ratio_noise: what rounding adds to a
    response's log-ratio, in nats, as it was last measured (`ratio/noise`); a tensor until it is
    read. is_slow, said: whether the last update has moved less than half of the target while the
    rate rises as fast as it may, and whether the user was told.
    """

    given: float
    lessons: int = 0
    hidden: bool = False
    ratio_noise: float | Tensor = 0.0
    is_slow: bool = field(default=False, init=False)
    said: bool = field(default=False, init=False)

    def note_noise(self, accelerator: Accelerator, metrics: Mapping[str, Tensor]) -> None:
        """Takes note of `ratio/noise`, the mean over the processes, in the updates that measure it."""
        if (noise := metrics.get("ratio/noise")) is not None:
            self.ratio_noise = (
                sum_over_processes(accelerator, noise.clone()) / accelerator.num_processes
            )

    @property
    def rounding(self) -> float:
        """The KL to itself that rounding makes, in nats per response: half the mean square of a
        log-ratio.
        """
        self.ratio_noise = float(self.ratio_noise)
        return self.ratio_noise**2 / 2

    def without_rounding(self, moved: float) -> float:
        """The KL that an update has moved, without what rounding makes of it."""
        return moved if self.rounding < NEGLIGIBLE * moved else max(moved - self.rounding, 0.0)

    def hides(self, moved: float) -> bool:
        """Whether what an update has moved may as well be rounding."""
        return self.without_rounding(moved) <= self.rounding

    def learned(self, way: float, moved: float, target: float, *, tested: bool) -> float:
        """The factor of the rate after an update that had a gradient. way: the sum of its steps'
        rates, over that of as many steps at the rate. moved, target: in nats per response. tested:
        whether it has tested rates.
        """
        self.lessons += 1
        finds, hides = self.lessons <= FINDING, self.hides(moved)
        if hides:
            # Rounding is no reason to fall.
            farther = max(sqrt(target / moved), 1.0) if moved > 0 else CHANGE
        else:
            farther = sqrt(target / self.without_rounding(moved))
        limit = FIRST_CHANGE if tested else CHANGE
        self.hidden = finds and hides
        self.is_slow = not finds and way * farther > RISE and moved < target / 2
        return min(max(way * farther, 1 / limit), limit if finds else RISE)

    def state_dict(self) -> dict[str, Any]:
        self.ratio_noise = float(self.ratio_noise)  # the device is waited for once
        names = ("given", "lessons", "hidden", "ratio_noise")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A resumed run that gives another rate begins to search there."""
        self.ratio_noise = state["ratio_noise"]
        if state["given"] == self.given:
            self.lessons, self.hidden = state["lessons"], state["hidden"]


# --- the search within an update ------------------------------------------------------------------


class LearningRateSearch:
    """Adapts the policy's learning rate to what the steps of one update move it, once the last one
    is made.

    A run's first update tests rates (Smith, arXiv 1506.01186): they double from step to step, up to
    the peak, and it ends with the step that moves the policy beyond the target. Otherwise a start
    that is too high would do damage that no later update mends. A step without a gradient, where
    all rewards tie or all is clipped, tests nothing.

    What rounding makes of the movement is taken off. Where it hides the movement, as in bf16 at
    first, what was measured still bounds it: the rate rises as far as is safe by that, and the next
    update tests rates from there on.

    With `--old_logprobs sampler` and several steps one more pass, of one minibatch, gives log
    π_before here.

    target: `--kl_per_update`, in nats per response; with None nothing is measured, and nothing
    changes. search: what goes from update to update. minibatches: of this update; the first one
    that has a row stands for all. steps: number of steps that the update is to make. old_logprobs:
    whose they are, as the option says. metrics: `kl_moved`, KL(π_before ‖ π_after) in nats per
    response, once the last step is made.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        target: float | None,
        search: Search,
        update: int,
        minibatches: Minibatches,
        steps: int,
        old_logprobs: str,
    ):
        self.optimizer, self.search, self.update, self.steps = optimizer, search, update, steps
        self.target = target
        self.metrics: dict[str, float] = {}
        if self.target is None:
            return
        self.watched = next(filter(None, minibatches))  # a process may have no row in the first
        if old_logprobs == "sampler" and steps > 1:
            self.watched = with_policy_logprobs(optimizer, self.watched)
        self.peak = float(optimizer.schedule.base_lrs[0])
        self.is_first = self.peak == search.given
        self.tests = self.is_first or search.hidden
        self.tested = 0  # steps so far that had a gradient, in an update that tests rates
        self.rates: list[float] = []  # of the steps so far
        self.norms: list[Tensor] = []  # of their gradients

    def before_step(self) -> None:
        """Sets the rate of the next step, if this update tests rates."""
        if self.target is None:
            return
        if self.tests:
            doubled = (
                2.0 ** (self.tested + 1 - self.steps)
                if self.is_first
                else min(2.0**self.tested, FIRST_CHANGE)
            )
            self.optimizer.set_peak_learning_rate(self.peak * doubled)
        self.rates.append(self.optimizer.next_learning_rate())

    def after_step(self, metrics: Mapping[str, Tensor]) -> bool:
        """Whether the update ends with this step. metrics: the step's; `grad_norm` is read, 0-d."""
        if self.target is None:
            return False
        self.norms.append(metrics["grad_norm"])
        is_last = len(self.norms) == self.steps
        if not (self.tests or is_last):
            return False
        accelerator = self.optimizer.accelerator
        self.tested += self.norms[-1].item() > 0
        with accelerator.autocast():
            moved = kl_moved(self.optimizer, self.watched)
        self.metrics["kl_moved"] = moved
        ends_early = self.tests and self.search.without_rounding(moved) > self.target
        if ends_early:
            which = "first update" if self.is_first else f"update {self.update}"
            accelerator.print(
                f"--kl_per_update: the {which} ends after {len(self.norms)} steps and {moved:.3g} nats"
            )
        if ends_early or is_last:
            self.set_next_rate(moved, self.target)
        return ends_early

    def set_next_rate(self, moved: float, target: float) -> None:
        """Sets the peak rate of the updates to come by what this one has moved, in nats per
        response.
        """
        # The KL grows with the square of the way, the sum of the steps' rates.
        norms = torch.stack(self.norms).tolist()
        way = sum(rate for rate, norm in zip(self.rates, norms, strict=True) if norm > 0)
        peak, search = self.peak, self.search
        if way > 0:
            peak *= search.learned(way / (self.steps * peak), moved, target, tested=self.tests)
            if search.is_slow and not search.said:
                search.said = True
                self.optimizer.accelerator.print(told_of_slowness(moved, target, peak))
        self.optimizer.set_peak_learning_rate(peak)


# --- measuring the movement -----------------------------------------------------------------------


@torch.no_grad()
def with_policy_logprobs(optimizer: Optimizer, microbatches: list[Microbatch]) -> list[Microbatch]:
    """The microbatches with the log-probs of the policy as it is now, whatever their old ones are
    by.
    """
    with optimizer.accelerator.autocast():
        before = policy_logprobs(optimizer.model, [microbatch.row for microbatch in microbatches])
    pairs = zip(microbatches, before, strict=True)
    return [replace(microbatch, noted_token_logprobs=logprobs) for microbatch, logprobs in pairs]


def told_of_slowness(moved: float, target: float, rate: float) -> str:
    return (
        f"--kl_per_update: an update moves {moved:.2g} of {target:g} nats, and the rate, {rate:.2g}, rises by "
        f"{RISE - 1:.0%} an update at most from now on. To restart the search, --resume with another --learning_rate"
    )


@torch.no_grad()
def kl_moved(optimizer: Optimizer, microbatches: list[Microbatch]) -> float:
    """KL(π_old ‖ π) of the policy now, in nats per response, over the microbatches of all
    processes.
    """
    policy = optimizer.model
    logprobs = torch.cat(policy_logprobs(policy, [microbatch.row for microbatch in microbatches]))
    if isinstance(policy, FSDPModule):
        policy.reshard()  # no backward pass does, and a reference may follow this process's shards
    kls = step_kl(
        logprobs, torch.cat([microbatch.policy_token_logprobs for microbatch in microbatches])
    ).double()
    responses = sum(microbatch.rewards.shape[:2].numel() for microbatch in microbatches)
    kl, count = sum_over_processes(
        optimizer.accelerator, torch.stack([kls.sum(), kls.new_tensor(responses)])
    ).tolist()
    return kl / count
