"""What the online loop says of an update: metrics, a warning where rounding is large, sample responses."""

import torch
from accelerate import Accelerator
from torch import Tensor

from fastp3o.objectives.base import Microbatch, Objective
from fastp3o.objectives.config import OnlineConfig
from fastp3o.packing.pack import efficiency
from fastp3o.rewards.pairs import differences
from fastp3o.rewards.scaling import tied
from fastp3o.rollouts.rollouts import Rollouts
from fastp3o.training.ratio_noise import TOLERATED, noise_warning
from fastp3o.training.run import Run
from fastp3o.training.sampler_gap import sampler_gap

SAMPLED_PROMPTS = 3


def report_update(
    run: Run,
    config: OnlineConfig,
    objective: Objective,
    update: int,
    rollouts: Rollouts,
    scores: dict[str, Tensor],
    minibatches: list[list[Microbatch]],
    step_metrics: list[dict[str, Tensor]],
    noise: Tensor,
    ties: int,
) -> None:
    """ties: how often a prompt was sampled again."""
    own = config.responses_per_prompt - config.from_mixture
    metrics = update_metrics(run.accelerator, rollouts, scores, minibatches, step_metrics, noise, own)
    metrics |= objective.adaptive_metrics
    if config.dynamic_sampling:
        metrics["sampled_again"] = ties / len(rollouts)
    rows = [microbatch.row for minibatch in minibatches for microbatch in minibatch]
    metrics["packing_efficiency"] = efficiency(rows, config.tokens_per_row)
    if run.accelerator.num_processes > 1:
        metrics["balance"] = balance(run.accelerator, minibatches)
    clip_range = objective.clip_range(metrics["response_length"])
    if clip_range is not None and metrics["ratio/noise"] > TOLERATED * clip_range:
        precision = run.optimizer.precision.name
        run.warn_once("ratio/noise", noise_warning(metrics["ratio/noise"], clip_range, precision))
    run.report(update, metrics, tokens=metrics["response_tokens"], shown=("reward", "kl", "response_length"))
    if config.samples_every and (update == config.updates or update % config.samples_every == 0):
        first = slice(SAMPLED_PROMPTS)
        rewards = scores["reward"][first].tolist()
        run.reporter.samples(update, rollouts.prompts[first], rollouts.responses[first], rewards)


def update_metrics(
    accelerator: Accelerator,
    rollouts: Rollouts,
    scores: dict[str, Tensor],
    minibatches: list[list[Microbatch]],
    step_metrics: list[dict[str, Tensor]],
    noise: Tensor,
    own: int,
) -> dict[str, float]:
    """Means over all processes: of all their rollouts as they were sampled, and of the optimizer steps on them.

    own: how many of a prompt's responses the policy has sampled; the others are from elsewhere.

    scores: of all processes, [P, K]. reward: unscaled, penalties included; reward_difference: mean |ri − rj| of pairs;
    tied_prompts: share of prompts whose rewards are all equal; kl: mean log π_old(y|x) − log π_ref(y|x), in nats per
    response; entropy: −mean log π_old of the responses' tokens, in nats per token; missing_eos: share of responses
    without an end-of-sequence; ratio/noise: what rounding adds to a log-ratio, and sampler_gap: by how much the
    sampler's own log π(y|x) differs from the old one where it gives it, both root mean squares in nats per response.
    """
    rewards = scores["reward"]
    microbatches = [microbatch for minibatch in minibatches for microbatch in minibatch]
    lengths = torch.tensor(rollouts.response_lengths, dtype=torch.float32)
    old_token_logprobs = torch.cat([microbatch.old_token_logprobs for microbatch in microbatches])
    log_ratios = torch.cat([microbatch.old_logprobs - microbatch.ref_logprobs for microbatch in microbatches])
    # Processes have different numbers of responses: means of all are means of what each adds to them.
    processes = accelerator.num_processes
    means = {
        "reward_difference": differences(rewards).abs().mean(),
        "tied_prompts": tied(rewards).float().mean(),
        # Of what the policy samples; where that is nothing, of what there is.
        "kl": log_ratios[:, : own or None].sum() * processes / rewards[:, : own or None].numel(),
        "entropy": -old_token_logprobs.sum() * processes / lengths.sum(),
        "response_length": lengths.mean(),
        "missing_eos": 1 - torch.tensor(rollouts.finished).float().mean(),
        "response_tokens": lengths.sum(),
        "ratio/noise": noise,
    }
    means |= {name: values.mean() for name, values in scores.items()}
    gap = sampler_gap(rollouts, microbatches)
    if gap is not None:
        means["sampler_gap"] = gap
    largest = sorted(name for name in step_metrics[0] if name.endswith("_max"))
    # The loss's own KL is that of the policy on its way; reported is that of the rollouts.
    for name in step_metrics[0].keys() - {*largest, "kl"}:
        means[name] = torch.stack([step[name] for step in step_metrics]).mean()
    names = sorted(means)
    values = accelerator.reduce(torch.stack([means[name].to(accelerator.device) for name in names]), reduction="mean")
    maxima = {
        name: accelerator.gather(torch.stack([step[name] for step in step_metrics])).max().item() for name in largest
    }
    return dict(zip(names, values.tolist(), strict=True)) | maxima


def balance(accelerator: Accelerator, minibatches: list[list[Microbatch]]) -> float:
    """Tokens of a process on average over those of the one with most in each minibatch, for which the others wait."""
    own = [sum(microbatch.row.tokens for microbatch in minibatch) for minibatch in minibatches]
    tokens = accelerator.gather(torch.tensor([own], device=accelerator.device, dtype=torch.float32))
    return (tokens.mean(0).sum() / tokens.amax(0).sum()).item()
