"""A learning rate that follows how far the steps of an update move the policy (`--kl_per_update`)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fastp3o.objectives.base import Microbatch, Minibatches
from fastp3o.objectives.config.base import OnlineConfig
from fastp3o.optimizer import Optimizer
from fastp3o.processes import sum_over_processes
from fastp3o.training.microbatches import policy_logprobs
from fastp3o_kernels.losses import step_kl

CHANGE = 4.0  # the most that an update multiplies or divides the rate by
FIRST_CHANGE = CHANGE**8  # the same of a run's first update
# After the first updates the rate rises by RISE at most: a policy that gets worse has more ties, so that its updates
# move less, and a rate that followed them at once would make an end of it.
FINDING, RISE = 10, 1.1


def adapted(
    optimizer: Optimizer,
    config: OnlineConfig,
    update: int,
    order: Sequence[int],
    minibatches: Minibatches,
    step_metrics: Sequence[dict[str, Tensor]],
    found: dict[str, float],
) -> Iterator[int]:
    """The minibatches of an update's steps, in this order. Adapts the policy's learning rate after the last one.

    A run's first update tests rates (Smith, arXiv 1506.01186): they double from step to step, up to the peak, and it
    ends with the step that moves the policy beyond the target. Otherwise a start that is too high would do damage that
    no later update mends. A step without a gradient, where all rewards tie or all is clipped, tests nothing.

    step_metrics: of the steps so far. found: gets `kl_moved`, KL(π_before ‖ π_after) in nats per response, by a pass of
    one minibatch, which stands for all. With `--old_logprobs sampler` and several steps one more before them gives log
    π_before.
    """
    target, accelerator, schedule = config.kl_per_update, optimizer.accelerator, optimizer.schedule
    if target is None:
        yield from order
        return
    watched = next(filter(None, minibatches))  # a process may have no row in the first
    if config.old_logprobs == "sampler" and config.steps_per_update > 1:
        with torch.no_grad(), accelerator.autocast():
            before = policy_logprobs(optimizer.model, [one.row for one in watched])
        watched = [replace(one, noted_token_logprobs=own) for one, own in zip(watched, before, strict=True)]
    peak, rates, tested, moved = float(schedule.base_lrs[0]), list[float](), 0, 0.0
    first = peak == config.learning_rate
    for made, index in enumerate(order, 1):
        if first:
            optimizer.set_peak_learning_rate(peak * 2.0 ** (tested + 1 - len(order)))
        rates.append(optimizer.next_learning_rate())
        yield index
        if first or made == len(order):
            tested += step_metrics[-1]["grad_norm"].item() > 0
            with accelerator.autocast():
                found["kl_moved"] = moved = kl_moved(optimizer, watched)
            if first and moved > target:
                accelerator.print(f"--kl_per_update: the first update ends after {made} steps and {moved:.3g} nats")
                break
    # The KL grows with the square of the way, the sum of the steps' rates.
    norms = torch.stack([one["grad_norm"] for one in step_metrics]).tolist()
    way = sum(rate for rate, norm in zip(rates, norms, strict=True) if norm > 0)
    if moved > 0 and way > 0:
        change = way / (len(order) * peak) * sqrt(target / moved)
        limit = FIRST_CHANGE if first else CHANGE
        peak *= min(max(change, 1 / limit), limit if update <= FINDING else RISE)
    optimizer.set_peak_learning_rate(peak)


@torch.no_grad()
def kl_moved(optimizer: Optimizer, microbatches: list[Microbatch]) -> float:
    """KL(π_old ‖ π) of the policy now, in nats per response, over the microbatches of all processes."""
    policy = optimizer.model
    logprobs = torch.cat(policy_logprobs(policy, [one.row for one in microbatches]))
    if isinstance(policy, FSDPModule):
        policy.reshard()  # no backward pass does it, and a reference may follow the own parts
    kls = step_kl(logprobs, torch.cat([one.policy_token_logprobs for one in microbatches])).double()
    responses = sum(one.rewards.numel() for one in microbatches)
    kl, count = sum_over_processes(optimizer.accelerator, torch.stack([kls.sum(), kls.new_tensor(responses)])).tolist()
    return kl / count
