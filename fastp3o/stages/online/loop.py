"""Stage 3, Pairwise Proximal Policy Optimization: the algorithm box of arXiv 2310.00212, from top to bottom.

Other objectives go through the same loop (`fastp3o.objectives`).
"""

from functools import partial

from torch import Tensor

from fastp3o.objectives.config import OnlineConfig
from fastp3o.rewards.reward import Reward
from fastp3o.rollouts.sampler import sample
from fastp3o.stages.online.report import report_update
from fastp3o.stages.online.setup import set_up
from fastp3o.training.minibatches import (
    finished,
    first_microbatch,
    gather_rollouts,
    pack_minibatches,
    with_logprobs,
)
from fastp3o.training.order import seed_of, shuffled
from fastp3o.training.processes import require_finite
from fastp3o.training.ratio_noise import ratio_noise


def train(config: OnlineConfig, *, reward: Reward | None = None, gold: Reward | None = None) -> None:
    """Trains a policy and leaves the model, checkpoints, metrics and evaluations in `config.output_dir`.

    config: of an objective, which it trains with. reward, gold: functions of rollouts in place of what config.reward
    and config.gold_reward name.

    Raises, after saving model and state, NotFiniteError when a reward, a loss or a gradient is not finite, and
    EndpointError when a remote reward has failed, FunctionError when a function has.
    """
    prompts, sampler, score, resample, objective, policy, reference, step, run = set_up(config, reward, gold)
    accelerator = run.accelerator
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
                rollouts, scores = gather_rollouts(accelerator, rollouts, score(rollouts))
                rollouts, scores, ties = resample(update, rollouts, scores)
                scaled = objective.scaler(scores["reward"])
                require_finite(accelerator, "a difference or a sum of rewards", scaled)
            with run.phase("logprobs"), accelerator.autocast():
                rows = pack_minibatches(accelerator, rollouts, config.minibatches_per_update, config.packing)
                counted = finished(rollouts) if config.mask_truncated else None
                minibatches = with_logprobs(accelerator, policy, reference, rows, scaled, counted, objective)
                minibatches = objective.prepare(policy, minibatches, partial(accelerator.reduce, reduction="sum"))
                noise = ratio_noise(policy, rollouts, first_microbatch(minibatches))
            with run.phase("update"):
                step_metrics: list[dict[str, Tensor]] = []
                for epoch in range(config.inner_epochs):
                    for index in shuffled(len(minibatches), seed_of(config.seed, update, epoch)).tolist():
                        loss = objective.loss if step_metrics else objective.first_loss
                        step_metrics.append(step(minibatches, index, loss))
                reference.follow(policy, update)
        report_update(run, config, objective, update, rollouts, scores, minibatches, step_metrics, noise, ties)
