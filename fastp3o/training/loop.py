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
from fastp3o.training.old_logprobs import old_logprobs, with_sampler_logprobs
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
    run, policy, reference, objective = loop.run, loop.policy, loop.reference, loop.objective
    accelerator, optimizer = run.accelerator, run.optimizer

    for update in run:  # between updates it evaluates, saves checkpoints and stops on signals
        with run.saved_if_not_finite(
            update
        ):  # a NaN, a lost server or a failing reward saves the model first
            # 1. Rollouts: K responses to each prompt, from the policy as it is now, or was `rounds_ahead` updates ago.
            with run.phase("rollout"):
                groups = loop.buffer(update)

            # 2. Rewards [P, K]. Each process scores what it has sampled; after the exchange all processes have all of
            #    them, since the scale is one for all, and minibatches mix prompts of all processes.
            with run.phase("reward"), accelerator.autocast():
                batch = loop.score(groups)
                # DAPO's dynamic sampling: a prompt whose responses have equal rewards has no
                # gradient.
                if config.dynamic_sampling:
                    batch = loop.buffer.resampled(
                        update, batch, loop.score, takes_pairs=objective.takes_pairs
                    )
                # Comparisons weigh their own pairs where the loss takes that; their row means are
                # scores to all others.
                if batch.pair_rewards is None or not objective.takes_pairs:
                    rewards = objective.scaler(batch.rewards["reward"])
                else:
                    rewards = objective.scaler.of_pairs(batch.pair_rewards)
                require_finite(accelerator, "a difference or a sum of rewards", rewards)

            # 3. Packed rows, with log π_old and log π_ref of each response token. Old log-probs are computed in the
            #    rows that train, so that every ratio is exactly 1 before the first step.
            with run.phase("logprobs"), accelerator.autocast():
                rows = pack_minibatches(
                    optimizer.share, batch.groups, config.minibatches_per_update, config.packing
                )
                # If fp16 overflows later, these rows tell where.
                optimizer.recent.extend(chain.from_iterable(rows))
                # Cut responses stay in baselines, whose rewards are above, and leave the loss.
                loss_mask = finished(batch.groups) if config.mask_truncated else None
                # Where an update makes one step, its loss has the old log-probs, and no pass is
                # made for them.
                old = old_logprobs(config, objective, policy, batch.groups)
                noted = config.old_logprobs == "sampler"
                minibatches = make_microbatches(
                    accelerator, old, reference, rows, rewards, loss_mask, noted=noted
                )
                # Importance weights π_old / π_sampler, for a sampler that is not quite the policy.
                if config.sampler_ratio_cap:
                    minibatches = with_sampler_logprobs(batch.groups, minibatches)
                # Rewards of turns and tokens are on the scale of the others, but not shifted: one
                # without keeps 0.
                if batch.token_rewards is not None:
                    minibatches = with_token_rewards(
                        minibatches, batch.token_rewards / objective.scaler.std()
                    )
                # Advantages, values, and the weight of the KL: whatever stays the same over all
                # steps of this update.
                minibatches = objective.prepare(policy, minibatches, loop.sum_over_processes)
                order = step_order(config, update, len(minibatches))
                # With sharded weights, all processes must make the same number of passes.
                passes = equal_passes(accelerator, minibatches, loss_mask, objective)
                # The sampler's log-probs, and how much of a ratio is rounding, are compared with
                # the policy's.
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
                # What an objective does once an update, such as TRPO's step of the policy after
                # those of its critic.
                with accelerator.autocast():
                    objective.conclude(policy, minibatches, loop.sum_over_processes)
                reference.follow(policy, update)

        # 5. Metrics, the log of rollouts, and samples for the console.
        further = loop.round_metrics(update) | search.metrics
        report_update(
            run, config, objective, Update(update, batch, further, minibatches, gaps, step_metrics)
        )


def step_order(config: OnlineConfig, update: int, minibatches: int) -> list[int]:
    """The minibatch of each of an update's steps: all of them in each inner epoch, in an order of
    the epoch's own, which a resumed run draws again from the same seed.
    """
    seeds = [derived_seed(config.seed, update, epoch) for epoch in range(config.inner_epochs)]
    return [index for seed in seeds for index in shuffled(minibatches, seed).tolist()]
