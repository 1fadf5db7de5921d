"""Stage 3, Pairwise Proximal Policy Optimization: the algorithm box of arXiv 2310.00212, from top to bottom.

Other objectives go through the same loop (`fastp3o.objectives`).
"""

from functools import partial
from itertools import chain

from torch import Tensor

from fastp3o.context import Caller
from fastp3o.objectives.config.base import OnlineConfig
from fastp3o.packing.pack import derived_seed, shuffled
from fastp3o.processes import require_finite
from fastp3o.rewards.reward import TOKEN_REWARDS
from fastp3o.rollouts.groups import finished
from fastp3o.training.kl_per_update import adapted
from fastp3o.training.logprob_gaps import evaluated_again, logprob_metrics, measures_noise
from fastp3o.training.metrics import Update, report_update
from fastp3o.training.microbatches import (
    counted,
    equal_passes,
    gather_groups,
    make_microbatches,
    pack_minibatches,
    with_token_rewards,
)
from fastp3o.training.old_logprobs import old_logprobs, with_sampler_logprobs
from fastp3o.training.online import set_up


def train(config: OnlineConfig, caller: Caller | None = None) -> None:
    """Trains a policy and leaves the model, checkpoints, metrics and evaluations in `config.output_dir`.

    config: of the objective to train with. caller: a program in Python that has started the run. Raises, after saving
    model and state, NotFiniteError if a reward, a loss or a gradient is not finite, EndpointError if a remote reward or
    a vLLM server fails, and FunctionError if a function fails.
    """
    buffer, score, logged, objective, policy, reference, add_gradients, search, run = set_up(config, caller)
    accelerator, old_are_sampled = run.accelerator, config.old_logprobs == "sampler"
    sum_over_processes = partial(accelerator.reduce, reduction="sum")
    for update in run:
        with run.saved_if_not_finite(update):
            with run.phase("rollout"):
                rollouts = buffer(update)
            with run.phase("reward"), accelerator.autocast():
                rollouts, rewards = gather_groups(accelerator, rollouts, score(rollouts))
                rollouts, rewards, sampled_again = buffer.resampled(update, rollouts, rewards, score)
                token_rewards = rewards.pop(TOKEN_REWARDS, None)
                scaled = objective.scaler(rewards["reward"])
                require_finite(accelerator, "a difference or a sum of rewards", scaled)
            with run.phase("logprobs"), accelerator.autocast():
                rows = pack_minibatches(run.optimizer.share, rollouts, config.minibatches_per_update, config.packing)
                run.optimizer.recent.extend(chain.from_iterable(rows))
                loss_mask = finished(rollouts) if config.mask_truncated else None
                # Where an update makes one step, its loss has the old log-probs, and no pass is made for them.
                old = old_logprobs(config, objective, policy, rollouts)
                minibatches = make_microbatches(
                    accelerator, old, reference, rows, scaled, loss_mask, noted=old_are_sampled
                )
                if config.sampler_ratio_cap:
                    minibatches = with_sampler_logprobs(rollouts, minibatches)
                if token_rewards is not None:
                    minibatches = with_token_rewards(minibatches, token_rewards / objective.scaler.std())
                minibatches = objective.prepare(policy, minibatches, sum_over_processes)
                seeds = [derived_seed(config.seed, update, epoch) for epoch in range(config.inner_epochs)]
                order = [index for seed in seeds for index in shuffled(len(minibatches), seed).tolist()]
                passes = equal_passes(accelerator, minibatches, loss_mask, objective)
                # What is compared with the sampler: all, or what the first step's loss computes.
                compared = counted(passes[order[0]]) if old_are_sampled else [*chain.from_iterable(minibatches)]
                again = evaluated_again(policy, rollouts, compared[0].row) if measures_noise(update) else None
            with run.phase("update"):
                found: dict[str, float] = {}
                step_metrics: list[dict[str, Tensor]] = []
                for index in adapted(run.optimizer, config, update, order, minibatches, step_metrics, found, search):
                    first = not step_metrics
                    gradients = add_gradients(passes[index], partial(objective.loss, first=first))
                    if first:
                        # The policy's log-probs are known by now, and nothing has moved yet.
                        gaps = logprob_metrics(rollouts, compared, again)
                        buffer.require_same_policy(update, rollouts, gaps)
                        search.note_noise(accelerator, gaps)
                    step_metrics.append(gradients | run.optimizer.step(gradients["loss"]))
                with accelerator.autocast():
                    objective.conclude(policy, minibatches, sum_over_processes)
                reference.follow(policy, update)
        further = buffer.metrics(update) | logged() | found
        done = Update(update, rollouts, rewards, sampled_again, further, minibatches, gaps, step_metrics)
        report_update(run, config, objective, done)
