"""Stage 3, Pairwise Proximal Policy Optimization: the algorithm box of arXiv 2310.00212, from top
to bottom.

Other objectives go through the same loop (`fastp3o.objectives`). P prompts with K responses each.
"""

from functools import partial
from itertools import chain

from torch import Tensor

from fastp3o.objectives.config.base import OnlineConfig
from fastp3o.packing.seeds import derived_seed, shuffled
from fastp3o.rollouts.groups import finished
from fastp3o.runtime.context import Caller
from fastp3o.runtime.finiteness import require_finite
from fastp3o.training.metrics import Update, report_update
from fastp3o.training.microbatches import (
    equal_passes,
    make_microbatches,
    pack_minibatches,
    with_token_rewards,
)
from fastp3o.training.old_logprobs import with_sampler_logprobs
from fastp3o.training.online import set_up


def train(config: OnlineConfig, caller: Caller | None = None) -> None:
    """Trains a policy and leaves the model, checkpoints, metrics and evaluations in
    `config.output_dir`.

    config: of the objective to train with. caller: a program in Python that has started the run.
    Raises, after saving model and state, NotFiniteError if a reward, a loss or a gradient is not
    finite, EndpointError if a remote reward or a vLLM server fails, and FunctionError if a function
    fails.
    """
    # Models, data, rewards and a resumed state are loaded here, and what cannot work is refused.
    loop = set_up(config, caller)
    config = loop.config  # with the length of packed rows that memory holds
    run, policy, reference, objective = loop.run, loop.policy, loop.reference, loop.objective
    accelerator, optimizer = run.accelerator, run.optimizer

    # Between updates the run evaluates, saves checkpoints, and stops on signals.
    for update in run:
        # A NaN, a lost server or a failing reward ends the run, with the model saved before that.
        with run.saved_if_not_finite(update):
            # 1. Rollouts: K responses to each prompt, from the policy as it is now, or as it was
            #    `rounds_ahead` updates ago.
            with run.phase("rollout"):
                groups = loop.buffer(update)

            # 2. Rewards, [P, K]. Each process scores what it has sampled. After the exchange all
            #    processes have all rewards, since they share one scale, and minibatches mix the
            #    prompts of all processes.
            with run.phase("reward"), accelerator.autocast():
                batch = loop.score(groups)
                # DAPO's dynamic sampling: a prompt whose responses have equal rewards has no
                # gradient.
                if config.dynamic_sampling:
                    batch = loop.buffer.resampled(
                        update, batch, loop.score, takes_pairs=objective.takes_pairs
                    )
                # A reward that compares gives each pair a weight. A loss that reads scores takes
                # the means over a response's comparisons in their place.
                if batch.pair_rewards is None or not objective.takes_pairs:
                    rewards = objective.scaler(batch.rewards["reward"])
                else:
                    rewards = objective.scaler.of_pairs(batch.pair_rewards)
                # Rewards near the largest float have sums and differences that are infinite.
                require_finite(accelerator, "a difference or a sum of rewards", rewards)

            # 3. Packed rows, with log π_old and log π_ref of each response token. Old log-probs are
            #    computed in the rows that train, so that every ratio is exactly 1 before the first
            #    step.
            with run.phase("logprobs"), accelerator.autocast():
                rows = pack_minibatches(
                    optimizer.share, batch.groups, config.minibatches_per_update, config.packing
                )
                # If fp16 overflows later, these rows tell where.
                optimizer.recent.extend(chain.from_iterable(rows))
                # Cut responses stay in baselines, whose rewards are above, and leave the loss.
                loss_mask = finished(batch.groups) if config.mask_truncated else None
                # Where an update makes one step, its loss computes the old log-probs, and they need
                # no pass of their own.
                old = loop.old_logprobs(batch.groups)
                noted = config.old_logprobs == "sampler"
                minibatches = make_microbatches(
                    accelerator, old, reference, rows, rewards, loss_mask, noted=noted
                )
                # Importance weights π_old / π_sampler, for a sampler that is not quite the policy.
                if config.reads_sampler:
                    minibatches = with_sampler_logprobs(batch.groups, minibatches)
                # Rewards of turns and tokens are scaled like the others, but not shifted, so that a
                # token without a reward keeps 0.
                if batch.token_rewards is not None:
                    minibatches = with_token_rewards(
                        minibatches, batch.token_rewards / objective.scaler.std()
                    )
                # Advantages, values, and the weight of the KL: whatever stays the same over all
                # steps of this update.
                minibatches = objective.prepare(policy, minibatches, loop.sum_over_processes)
                # Each inner epoch takes the minibatches in another order.
                order = step_order(config, update, len(minibatches))
                # With sharded weights, all processes must make the same number of passes.
                passes = equal_passes(accelerator, minibatches, loss_mask, objective)
                # What the policy's log-probs are compared with once they are known: the sampler's,
                # and their own in other rows, which shows how much of a ratio is rounding.
                comparison = loop.comparison(update, batch.groups, minibatches, passes[order[0]])

            # 4. The steps: inner_epochs passes over the minibatches.
            with run.phase("update"):
                step_metrics: list[dict[str, Tensor]] = []
                # With --kl_per_update the rate changes between steps, and an update may end before
                # its order does.
                search = loop.learning_rate_search(update, minibatches, len(order))
                for number, index in enumerate(order):
                    search.before_step()
                    # In the first step the policy is still the old one.
                    loss = partial(objective.loss, first=number == 0)
                    gradients = loop.add_gradients(passes[index], loss)
                    if number == 0:
                        # The policy's log-probs are known by now, and nothing has moved yet. Ends
                        # the run if servers have sampled from other weights.
                        gaps = loop.measured(update, comparison)
                    step_metrics.append(gradients | optimizer.step(gradients["loss"]))
                    if search.after_step(step_metrics[-1]):
                        break
                # What an objective does once per update, such as TRPO, whose policy makes its step
                # after those of the critic.
                with accelerator.autocast():
                    objective.conclude(policy, minibatches, loop.sum_over_processes)
                # A reference may move, too: as a copy or a moving average of the policy.
                reference.follow(policy, update)

        # 5. Metrics, the log of rollouts, and samples for the console.
        further = loop.round_metrics(update, batch) | search.metrics
        outcome = Update(update, batch, further, minibatches, gaps, step_metrics)
        report_update(run, objective, outcome, loop.measures, config)


def step_order(config: OnlineConfig, update: int, minibatches: int) -> list[int]:
    """The minibatch of each of an update's steps: all of them in each inner epoch, in an order that
    depends on the seed and the epoch alone, so that a resumed run has the same.
    """
    seeds = [derived_seed(config.seed, update, epoch) for epoch in range(config.inner_epochs)]
    return [index for seed in seeds for index in shuffled(minibatches, seed).tolist()]
