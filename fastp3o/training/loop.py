"""Stage 3, Pairwise Proximal Policy Optimization: the algorithm box of arXiv 2310.00212, from top to bottom.

Other objectives go through the same loop (`fastp3o.objectives`).
"""

from functools import partial
from itertools import chain

from torch import Tensor

from fastp3o.objectives.config.base import OnlineConfig
from fastp3o.packing.seeds import derived_seed, shuffled
from fastp3o.rewards.reward import TOKEN_REWARDS
from fastp3o.rollouts.groups import finished
from fastp3o.runtime.context import Caller
from fastp3o.runtime.finiteness import require_finite
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
    for update in run:  # between updates it evaluates, saves checkpoints and stops on signals
        with run.saved_if_not_finite(update):  # a NaN, a lost server or a failing reward saves the model first
            # 1. Rollouts: K responses to each prompt, from the policy as it is now, or was `rounds_ahead` updates ago.
            with run.phase("rollout"):
                rollouts = buffer(update)
            # 2. Rewards [P, K]. Each process scores what it has sampled; after the exchange all processes have all of
            #    them, since the scale is one for all, and minibatches mix prompts of all processes.
            with run.phase("reward"), accelerator.autocast():
                rollouts, rewards = gather_groups(accelerator, rollouts, score(rollouts))
                # DAPO's dynamic sampling: a prompt whose responses have equal rewards has no gradient.
                rollouts, rewards, sampled_again = buffer.resampled(update, rollouts, rewards, score)
                # Rewards of turns and tokens are no column of the metrics: they wait for the rows that they belong to.
                token_rewards = rewards.pop(TOKEN_REWARDS, None)
                scaled = objective.scaler(rewards["reward"])
                require_finite(accelerator, "a difference or a sum of rewards", scaled)
            # 3. Packed rows, with log π_old and log π_ref of each response token. Old log-probs are computed in the
            #    rows that train, so that every ratio is exactly 1 before the first step.
            with run.phase("logprobs"), accelerator.autocast():
                rows = pack_minibatches(run.optimizer.share, rollouts, config.minibatches_per_update, config.packing)
                # If fp16 overflows later, these rows tell where.
                run.optimizer.recent.extend(chain.from_iterable(rows))
                # Cut responses stay in baselines, whose rewards are above, and leave the loss.
                loss_mask = finished(rollouts) if config.mask_truncated else None
                # Where an update makes one step, its loss has the old log-probs, and no pass is made for them.
                old = old_logprobs(config, objective, policy, rollouts)
                minibatches = make_microbatches(
                    accelerator, old, reference, rows, scaled, loss_mask, noted=old_are_sampled
                )
                # Importance weights π_old / π_sampler, for a sampler that is not quite the policy.
                if config.sampler_ratio_cap:
                    minibatches = with_sampler_logprobs(rollouts, minibatches)
                # On the scale of the other rewards, but not shifted: a turn without a reward keeps 0.
                if token_rewards is not None:
                    minibatches = with_token_rewards(minibatches, token_rewards / objective.scaler.std())
                # Advantages, values, and the weight of the KL: whatever stays the same over all steps of this update.
                minibatches = objective.prepare(policy, minibatches, sum_over_processes)
                # Each inner epoch has its own order, which a resumed run draws again from the same seed.
                seeds = [derived_seed(config.seed, update, epoch) for epoch in range(config.inner_epochs)]
                order = [index for seed in seeds for index in shuffled(len(minibatches), seed).tolist()]
                # With sharded weights, all processes must make the same number of passes.
                passes = equal_passes(accelerator, minibatches, loss_mask, objective)
                # What is compared with the sampler: all, or what the first step's loss computes.
                compared = counted(passes[order[0]]) if old_are_sampled else [*chain.from_iterable(minibatches)]
                again = evaluated_again(policy, rollouts, compared[0].row) if measures_noise(update) else None
            # 4. The steps: inner_epochs passes over the minibatches.
            with run.phase("update"):
                rate_metrics: dict[str, float] = {}
                step_metrics: list[dict[str, Tensor]] = []
                # With --kl_per_update the rate changes between steps, and an update may end before its order does.
                steps = adapted(run.optimizer, config, update, order, minibatches, step_metrics, rate_metrics, search)
                for index in steps:
                    first = not step_metrics
                    gradients = add_gradients(passes[index], partial(objective.loss, first=first))
                    if first:
                        # The policy's log-probs are known by now, and nothing has moved yet.
                        gaps = logprob_metrics(rollouts, compared, again)
                        buffer.require_same_policy(update, rollouts, gaps)
                        search.note_noise(accelerator, gaps)
                    step_metrics.append(gradients | run.optimizer.step(gradients["loss"]))
                # What an objective does once an update, such as TRPO's step of the policy after those of its critic.
                with accelerator.autocast():
                    objective.conclude(policy, minibatches, sum_over_processes)
                reference.follow(policy, update)
        # 5. Metrics, the log of rollouts, and samples for the console.
        further = buffer.metrics(update) | logged() | rate_metrics
        done = Update(update, rollouts, rewards, sampled_again, further, minibatches, gaps, step_metrics)
        report_update(run, config, objective, done)
