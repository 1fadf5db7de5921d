"""Stage 3, Pairwise Proximal Policy Optimization: the algorithm box of arXiv 2310.00212, from top to bottom.

Other algorithms of the same kind go through the same loop with an update of their own (`fastp3o.objectives`).
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from fastp3o.config import OnlineConfig
from fastp3o.data import load_prompts
from fastp3o.evaluation.evaluate import evaluate
from fastp3o.models.loading import load_policy, load_tokenizer
from fastp3o.models.packed_model import unwrap
from fastp3o.models.reference import SecondModel, WithoutAdapters
from fastp3o.models.trainable import choose_trainable
from fastp3o.objectives.base import Algorithm
from fastp3o.objectives.p3o import P3O
from fastp3o.packing.pack import efficiency
from fastp3o.precision import precision_of
from fastp3o.rewards.reward import Reward, load_reward, rewards_of
from fastp3o.rewards.scaling import differences
from fastp3o.rollouts.transformers_sampler import Rollouts, sample
from fastp3o.stages.setup import load_data, make_accelerator, share, start_trackers
from fastp3o.training.checkpoints import FINISHED_MODEL, STATE, load_state, prepare_output_dir, save_model, save_state
from fastp3o.training.finite import NotFiniteError, require_finite
from fastp3o.training.minibatches import Pairs, optimizer_step, pack_minibatches, with_logprobs
from fastp3o.training.optimizer import Optimization
from fastp3o.training.order import rows_of_step, seed_of, share_of_process, shuffled
from fastp3o.training.ratio_noise import TOLERATED, noise_warning, ratio_noise
from fastp3o.training.reporting import Phases, Reporter, peak_memory_gib


def train(
    config: OnlineConfig,
    algorithm: type[Algorithm] = P3O,
    *,
    reward: Reward | None = None,
    gold: Reward | None = None,
) -> None:
    """Trains a policy and leaves the model, checkpoints, metrics and evaluations in `config.output_dir`.

    algorithm: P3O with a P3OConfig, or a baseline with its own configuration. reward, gold: functions of rollouts in
    place of what config.reward and config.gold_reward name.

    Raises NotFiniteError, after saving model and state, when a reward, a loss or a gradient is not finite.
    """
    precision = precision_of(config.precision, automatic="fp16")
    accelerator = make_accelerator(config, precision)
    prompts_of_process = share(accelerator, config.prompts_per_update, "prompts_per_update")
    share(accelerator, config.prompts_per_minibatch, "prompts_per_minibatch")
    folder = prepare_output_dir(accelerator, config)

    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    prompts, eval_prompts = load_data(accelerator, load_prompts, config.prompts, config.eval_prompts, tokenizer, config)
    device, trust = accelerator.device, config.trust_remote_code
    method = algorithm(config)
    model = load_policy(config.model, trust_remote_code=trust).train()
    model.check_reach(config.max_prompt_tokens + config.max_response_tokens)
    choose_trainable(model, config)
    if config.gradient_checkpointing:
        model.recompute_activations()
    method.add_to(model)

    def reward_of(name: str) -> Reward:
        return load_reward(
            name,
            tokenizer,
            device=device,
            dtype=precision.weights,
            tokens_per_row=config.tokens_per_row,
            share_prompts=config.share_prompts,
            offload=config.offload,
            trust_remote_code=trust,
        )

    reward = reward or reward_of(config.reward)
    gold = gold or (reward_of(config.gold_reward) if config.gold_reward else None)

    minibatches_per_update = config.prompts_per_update // config.prompts_per_minibatch
    steps = config.updates * config.inner_epochs * minibatches_per_update
    optimization = Optimization(accelerator, model, precision, config, steps, method.learning_rates)
    policy = optimization.model
    if config.lora_rank and not config.reference:
        reference = WithoutAdapters(policy)
    else:
        name = config.reference or config.model
        frozen = load_policy(name, device=device, dtype=precision.weights, trust_remote_code=trust)
        reference = SecondModel(frozen, device, offload=config.offload)
    accelerator.register_for_checkpointing(method.scaler)
    done = load_state(accelerator, folder / STATE) if config.resume else 0

    start_trackers(accelerator, config)
    reporter = Reporter(accelerator, folder, stage=algorithm.__name__, first_step=done, steps=config.updates)
    phase = Phases()
    warned = False

    def evaluate_after(update: int) -> None:
        if eval_prompts is not None:
            metrics = evaluate(accelerator, policy, reference, tokenizer, reward, gold, eval_prompts, config)
            reporter.evaluation(update, metrics)

    def save_after(update: int, model: Path, state: Path = folder / STATE) -> None:
        save_model(accelerator, policy, tokenizer, model)
        save_state(accelerator, state, update)

    if not config.resume:
        evaluate_after(0)
    for update in range(done + 1, config.updates + 1):
        of_steps: list[dict[str, Tensor]] = []
        try:
            with phase("rollout"):
                rows = rows_of_step(
                    update - 1, batch_size=config.prompts_per_update, total=len(prompts), seed=config.seed
                )
                x = prompts[share_of_process(rows, accelerator)]
                rollouts = sample(
                    unwrap(policy),
                    tokenizer,
                    x["prompt"],
                    x["prompt_ids"],
                    responses_per_prompt=config.responses_per_prompt,
                    max_response_tokens=config.max_response_tokens,
                    batch_size=config.rollout_batch_size,
                    seed=seed_of(config.seed, update, accelerator.process_index),
                )
            with phase("reward"), accelerator.autocast():
                rewards = rewards_of(
                    reward,
                    rollouts,
                    missing_eos_penalty=config.missing_eos_penalty,
                ).view(prompts_of_process, config.responses_per_prompt)
                require_finite(accelerator, "a reward", rewards)
                scaled = method.scaler(rewards, seen=accelerator.gather(rewards.to(accelerator.device)).cpu())
            with phase("logprobs"):
                packed = pack_minibatches(rollouts, minibatches_per_update, config)
                minibatches = with_logprobs(
                    accelerator, policy, reference, packed, scaled, by_tokens=method.averages_tokens
                )
                minibatches = method.prepare(accelerator, policy, minibatches)
                with accelerator.autocast():
                    noise = ratio_noise(policy, rollouts, minibatches[0][0])
            with phase("update"):
                for epoch in range(config.inner_epochs):
                    for index in shuffled(len(minibatches), seed_of(config.seed, update, epoch)).tolist():
                        of_steps.append(optimizer_step(optimization, minibatches[index], method.loss))
        except NotFiniteError as error:
            stopped = folder / f"stopped-in-{update:06}"
            # Between steps of an update there is no state that --resume could continue exactly: it is kept apart.
            save_after(update - 1, stopped / FINISHED_MODEL, stopped / STATE if of_steps else folder / STATE)
            reporter.close()
            raise NotFiniteError(f"update {update}: {error}; the model as it was before is in {stopped}") from error

        metrics = metrics_of_update(accelerator, rollouts, rewards, minibatches, of_steps, noise)
        every_row = [row for rows in packed for row in rows]
        metrics["packing_efficiency"] = efficiency(every_row, config.tokens_per_row)
        if method.clip_range and metrics["ratio/noise"] > TOLERATED * method.clip_range and not warned:
            reporter.print(noise_warning(metrics["ratio/noise"], method.clip_range, precision.name))
            warned = True
        seconds = phase.read()
        reporter.step(
            update,
            metrics
            | {"learning_rate": optimization.learning_rate, "peak_memory_gib": peak_memory_gib()}
            | {"tokens_per_second": metrics["response_tokens"] / sum(seconds.values())}
            | {f"seconds_{name}": value for name, value in seconds.items()},
            shown=("reward", "kl", "response_length"),
        )
        last = update == config.updates
        if config.samples_every and (last or update % config.samples_every == 0):
            show_samples(reporter, update, rollouts, rewards)
        if config.evaluates_after(update):
            evaluate_after(update)
        if config.save_every and update % config.save_every == 0:
            save_after(update, folder / f"checkpoint-{update:06}")
    save_after(config.updates, folder / FINISHED_MODEL)
    reporter.close()


def metrics_of_update(
    accelerator: Accelerator,
    rollouts: Rollouts,
    rewards: Tensor,
    minibatches: list[list[Pairs]],
    of_steps: list[dict[str, Tensor]],
    noise: Tensor,
) -> dict[str, float]:
    """Means over all processes: of the rollouts as they were sampled, and of the optimizer steps taken on them.

    reward: unscaled, penalties included; reward_difference: mean |ri − rj| of pairs; kl: mean log π_old(y|x) −
    log π_ref(y|x), in nats per response; entropy: −mean log π_old of the responses' tokens, in nats per token;
    missing_eos: share of responses without an end-of-sequence; ratio/noise: what rounding adds to a log-ratio, in nats
    per response.
    """
    pairs = [pairs for minibatch in minibatches for pairs in minibatch]
    lengths = torch.tensor([len(ids) for ids in rollouts.response_ids], dtype=torch.float32)
    old_token_logprobs = torch.cat([p.old_token_logprobs for p in pairs])
    log_ratios = torch.cat([p.old_logprobs - p.ref_logprobs for p in pairs])
    means = {
        "reward": rewards.mean(),
        "reward_difference": differences(rewards).abs().mean(),
        "kl": log_ratios.mean(),
        "entropy": -old_token_logprobs.mean(),
        "response_length": lengths.mean(),
        "missing_eos": 1 - torch.tensor(rollouts.finished).float().mean(),
        "response_tokens": lengths.sum() * accelerator.num_processes,
        "ratio/noise": noise,
    }
    largest = sorted(name for name in of_steps[0] if name.endswith("_max"))
    for name in of_steps[0].keys() - {*largest, "kl"}:
        means[name] = torch.stack([step[name] for step in of_steps]).mean()
    names = sorted(means)
    values = accelerator.reduce(torch.stack([means[name].to(accelerator.device) for name in names]), reduction="mean")
    maxima = {name: accelerator.gather(torch.stack([step[name] for step in of_steps])).max().item() for name in largest}
    return dict(zip(names, values.tolist(), strict=True)) | maxima


def show_samples(reporter: Reporter, update: int, rollouts: Rollouts, rewards: Tensor, prompts: int = 3) -> None:
    K = rewards.shape[1]
    reporter.samples(
        update,
        rollouts.prompts[: K * prompts : K],
        [rollouts.responses[K * p : K * p + K] for p in range(min(prompts, len(rewards)))],
        rewards[:prompts].tolist(),
    )
