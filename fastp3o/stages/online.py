"""Stage 3, Pairwise Proximal Policy Optimization: the algorithm box of arXiv 2310.00212, from top to bottom.

Other objectives go through the same loop (`fastp3o.objectives`).
"""

from functools import partial

from fastp3o.objectives.config import OnlineConfig
from fastp3o.rewards.reward import Reward
from fastp3o.rewards.scoring import rewards_of
from fastp3o.rollouts.sampler import sample
from fastp3o.stages.online_report import report_update
from fastp3o.stages.online_setup import set_up
from fastp3o.training.finite import require_finite
from fastp3o.training.minibatches import (
    first_microbatch,
    gather_rollouts,
    optimizer_step,
    pack_minibatches,
    with_logprobs,
)
from fastp3o.training.order import seed_of, shuffled
from fastp3o.training.ratio_noise import ratio_noise


def train(config: OnlineConfig, *, reward: Reward | None = None, gold: Reward | None = None) -> None:
    """Trains a policy and leaves the model, checkpoints, metrics and evaluations in `config.output_dir`.

    config: of an objective, which it trains with. reward, gold: functions of rollouts in place of what config.reward
    and config.gold_reward name.

    Raises, after saving model and state, NotFiniteError when a reward, a loss or a gradient is not finite, and
    EndpointError when a remote reward has failed.
    """
    accelerator, prompts, sampler, reward, objective, policy, reference, optimizer, run = set_up(config, reward, gold)
    for update in run:
        with run.saved_if_not_finite(update):
            with run.phase("rollout"):
                rollouts = sample(
                    sampler,
                    *prompts(update),
                    responses_per_prompt=config.responses_per_prompt,
                    seed=seed_of(config.seed, update),
                )
            with run.phase("reward"), accelerator.autocast():
                rewards, parts = rewards_of(accelerator, reward, rollouts, config, config.max_response_tokens)
                require_finite(accelerator, "a reward", rewards)
                rollouts, rewards = gather_rollouts(accelerator, rollouts, rewards)
                scaled_rewards = objective.scaler(rewards)
                require_finite(accelerator, "a difference or a sum of rewards", scaled_rewards)
            with run.phase("logprobs"), accelerator.autocast():
                rows = pack_minibatches(accelerator, rollouts, config.minibatches_per_update, config.packing)
                minibatches = with_logprobs(
                    accelerator, policy, reference, rows, scaled_rewards, averages_tokens=objective.averages_tokens
                )
                sum_over_processes = partial(accelerator.reduce, reduction="sum")
                minibatches = objective.prepare(policy, minibatches, sum_over_processes)
                noise = ratio_noise(policy, rollouts, first_microbatch(minibatches))
            with run.phase("update"):
                step_metrics = []
                for epoch in range(config.inner_epochs):
                    for index in shuffled(len(minibatches), seed_of(config.seed, update, epoch)).tolist():
                        step_metrics.append(optimizer_step(optimizer, minibatches, index, objective.loss))
        report_update(run, config, objective, update, rollouts, rewards, parts, minibatches, step_metrics, noise)
