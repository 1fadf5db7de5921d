"""Reports an update of the online loop: metrics, a warning if rounding is large, rollouts, sample
responses.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch import Tensor

from fastp3o.objectives.base import Microbatch, Objective
from fastp3o.objectives.config.base import OnlineConfig
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.packing.pack import efficiency
from fastp3o.packing.packed_row import to_device
from fastp3o.rewards.scaling import Outlier, differences, tied
from fastp3o.rollouts.groups import Group, finished, lengths
from fastp3o.rollouts.turns.tools import COUNTS
from fastp3o.run.log import LoggedGroup, LoggedResponse, finite_or_none
from fastp3o.run.run import Run
from fastp3o.training.batch import RolloutBatch
from fastp3o.training.logprob_gaps import TOLERATED, noise_warning
from fastp3o.training.microbatches import mean_over_steps

SAMPLED_PROMPTS = 3


@dataclass(frozen=True)
class Update:
    """A finished update. The batch is that of all processes, the rest is of this one."""

    number: int
    batch: RolloutBatch
    # Of the rollouts, of what rewards log, and of the search for a learning rate.
    round_metrics: dict[str, float]
    minibatches: list[list[Microbatch]]
    logprob_metrics: dict[str, Tensor]
    step_metrics: list[dict[str, Tensor]]

    @property
    def microbatches(self) -> list[Microbatch]:
        return [microbatch for minibatch in self.minibatches for microbatch in minibatch]


# --- the report -----------------------------------------------------------------------------------


def report_update(run: Run, config: OnlineConfig, objective: Objective, update: Update) -> None:
    from_policy = config.responses_per_prompt - config.from_mixture
    if not config.rewards:  # minus the KL to the teacher, as it is sampled
        rewards = torch.cat(
            [
                microbatch.ref_logprobs - microbatch.old_logprobs
                for microbatch in update.microbatches
            ]
        ).cpu()
        table = gather_table(run.optimizer, update, rewards)
        update = replace(update, batch=replace(update.batch, rewards={"reward": table}))
    metrics, log_ratios = update_metrics(run.optimizer, update, from_policy)
    if not config.needs_reference:
        metrics.pop("kl")
        log_ratios = torch.full_like(log_ratios, torch.nan)  # which logs leave out
    metrics |= objective.adaptive_metrics | update.round_metrics
    if not (config.rounds_ahead or config.truncates):
        metrics.pop("sampler_kl", None)  # rounding alone
    if config.dynamic_sampling:
        metrics["sampled_again"] = update.batch.sampled_again / len(update.batch.groups)
    metrics["packing_efficiency"] = efficiency(
        [microbatch.row for microbatch in update.microbatches], config.packing.tokens_per_row
    )
    if run.accelerator.num_processes > 1:
        metrics["balance"] = balance(run.accelerator, update.minibatches)
    clip_range = objective.clip_range(metrics["response_length"])
    noise = metrics.get("ratio/noise", 0.0)
    if clip_range is not None and noise > TOLERATED * clip_range:
        precision, device = run.optimizer.precision.name, run.accelerator.device.type
        run.warn_once("ratio/noise", noise_warning(noise, clip_range, precision, device))
    if outlier := objective.scaler.outlier:
        run.warn_once("outlier", outlier_warning(outlier))
    if metrics["tied_prompts"] == 1 and config.reads_rewards:
        run.warn_once(
            "tied",
            "all responses to every prompt got the same reward, so this update has no gradient (tied_prompts is 1)",
        )
    beside_bar = tuple(name for name in ("reward", "kl", "response_length") if name in metrics)
    run.report(update.number, metrics, tokens=metrics["response_tokens"], shown=beside_bar)
    if config.log_rollouts and update.number % config.log_rollouts == 0:
        run.reporter.rollouts(update.number, logged_groups(run, config, update, log_ratios))
    if config.samples_every and (
        update.number == config.updates or update.number % config.samples_every == 0
    ):
        shown = update.batch.groups[:SAMPLED_PROMPTS]
        prompts = [group.prompt.text for group in shown]
        responses = [[response.text for response in group.responses] for group in shown]
        run.reporter.samples(
            update.number, prompts, responses, update.batch.rewards["reward"][: len(shown)].tolist()
        )


def outlier_warning(outlier: Outlier) -> str:
    return (
        f"warning: a reward, or a difference of two, is {outlier.distance:.3g}, far beyond the others: it counts as "
        f"{outlier.bound:.3g} in the deviation that divides rewards (--reward_scaling)"
    )


# --- metrics --------------------------------------------------------------------------------------


def update_metrics(
    optimizer: Optimizer, update: Update, from_policy: int
) -> tuple[dict[str, float], Tensor]:
    """Metrics, and log π_old(y|x) − log π_ref(y|x) of this process's responses, [p, K] fp32 on the
    CPU.

    Metrics are means over all processes: of their rollouts as they were sampled, and of the
    optimizer steps on them.

    from_policy: number of a prompt's responses that are the policy's; the others are the mixture's.

    reward: unscaled, less penalties. reward_difference: mean |ri − rj| of pairs. tied_prompts:
    share of prompts whose rewards are all equal. kl: mean log π_old(y|x) − log π_ref(y|x), in nats
    per response; without a reference it means nothing. entropy: −mean log π_old of the responses'
    tokens, in nats per token. missing_eos: share without an end-of-sequence. Others:
    `logprob_metrics`.
    """
    accelerator, shares = optimizer.accelerator, optimizer.share.count
    microbatches = update.microbatches
    old_token_logprobs = torch.cat([microbatch.old_token_logprobs for microbatch in microbatches])
    log_ratios = torch.cat(
        [microbatch.old_logprobs - microbatch.ref_logprobs for microbatch in microbatches]
    )

    # 1. Means over the processes. Those have different numbers of responses: a mean over all is
    #    the mean of what each adds to it.
    on_host = rollout_metrics(update.batch)
    # Over the policy's responses, or over all if none is the policy's.
    policys = slice(from_policy or None)
    responses = update.batch.rewards["reward"][:, policys].numel()
    tokens = lengths(update.batch.groups).sum()
    on_device = {
        "kl": log_ratios[:, policys].sum() * shares / responses,
        "entropy": -old_token_logprobs.sum() * shares / tokens,
        **update.logprob_metrics,
    }
    host_values = to_device(torch.stack([*on_host.values()]), accelerator.device)
    means = torch.cat([host_values, torch.stack([*on_device.values()])])
    if accelerator.num_processes > 1:
        means = accelerator.reduce(means, reduction="mean")

    # 2. Means over the steps. The loss's own KL is of the moving policy; the reported one is of the
    #    rollouts.
    steps = [
        {name: value for name, value in step.items() if name != "kl"}
        for step in update.step_metrics
    ]
    step_means = mean_over_steps(accelerator, steps)

    # 3. The host waits for the device once, for all of them.
    values = torch.cat([means, torch.stack([*step_means.values()]), log_ratios.flatten()]).cpu()
    names = [*on_host, *on_device, *step_means]
    by_name = dict(zip(names, values[: len(names)].tolist(), strict=True))
    in_order = sorted(names, key=lambda name: (name.endswith("_max"), name))
    return {name: by_name[name] for name in in_order}, values[len(names) :].view_as(log_ratios)


def rollout_metrics(batch: RolloutBatch) -> dict[str, Tensor]:
    """Metrics that need only rollouts and rewards, 0-d on the CPU."""
    rewards, tokens = batch.rewards["reward"], lengths(batch.groups)
    return {
        "reward_difference": differences(rewards).abs().mean(),
        "tied_prompts": tied(rewards).float().mean(),
        "response_length": tokens.mean(),
        "missing_eos": 1 - finished(batch.groups).float().mean(),
        "response_tokens": tokens.sum(),
        **turn_metrics(batch.groups),
        **{name: table.mean() for name, table in batch.rewards.items()},
    }


def turn_metrics(groups: Sequence[Group]) -> dict[str, Tensor]:
    """Means over trajectories: turns, tokens of observations, whether the environment has failed;
    of tools also the calls, and those that were answered with an error.
    """
    responses = [response for group in groups for response in group.responses]
    if not any(response.turns for response in responses):
        return {}
    trajectories = []
    for response in responses:
        from_policy = sum(end - start for start, end in response.spans)
        observed = len(response.ids) - from_policy
        has_failed = bool(response.turns[-1].failure)
        trajectories.append((len(response.turns), observed, has_failed))
    means = torch.tensor(trajectories, dtype=torch.float32).mean(0)
    names = "turns", "observation_tokens", "environment_failures"
    metrics = dict(zip(names, means, strict=True))
    # Tools count their calls as rewards of turns.
    rewards = [turn.rewards for response in responses for turn in response.turns]
    for name in COUNTS:
        if any(name in of_turn for of_turn in rewards):
            total = sum(of_turn.get(name, 0.0) for of_turn in rewards)
            metrics[name] = torch.tensor(total / len(responses))
    return metrics


def balance(accelerator: Accelerator, minibatches: list[list[Microbatch]]) -> float:
    """Mean tokens of a process, divided by those of the process with most in each minibatch, for
    which others wait.
    """
    tokens_of_process = [
        sum(microbatch.row.tokens for microbatch in minibatch) for minibatch in minibatches
    ]
    tokens = accelerator.gather(
        to_device(torch.tensor([tokens_of_process], dtype=torch.float32), accelerator.device)
    )
    return (tokens.mean(0).sum() / tokens.amax(0).sum()).item()


# --- rollouts that are logged ---------------------------------------------------------------------


def gather_table(optimizer: Optimizer, update: Update, values: Tensor) -> Tensor:
    """The table of all processes, [P, K], from the values of this one's responses, [p, K] fp32. All
    are on the CPU.
    """
    places = (place for microbatch in update.microbatches for place in microbatch.row.groups)
    by_place = dict(optimizer.share.gather([*zip(places, values.tolist(), strict=True)]))
    return torch.tensor([by_place[place] for place in range(len(update.batch.groups))])


def logged_groups(
    run: Run, config: OnlineConfig, update: Update, log_ratios: Tensor
) -> list[LoggedGroup]:
    """The groups of an update that are logged, in order. log_ratios: of this process's responses,
    [p, K]. Those whose prompts have the smallest hashes are taken, so that a prompt that is logged
    in one epoch tends to be in the next.
    """
    groups = update.batch.groups
    places: Sequence[int] = range(len(groups))
    if config.log_rollouts_prompts:
        hashes = [hashlib.sha256(group.prompt.text.encode()).digest() for group in groups]
        by_hash = sorted(places, key=lambda place: hashes[place])
        places = sorted(by_hash[: config.log_rollouts_prompts])
    table = gather_table(run.optimizer, update, log_ratios)
    # Over the policy's responses, or over all if none is the policy's.
    from_policy = config.responses_per_prompt - config.from_mixture
    kls = table[:, : from_policy or None].mean(dim=1).tolist()
    ratios = table.tolist()
    rewards = {name: values.tolist() for name, values in update.batch.rewards.items()}
    logged = []
    for place in places:
        rewards_of_prompt = {name: values[place] for name, values in rewards.items()}
        responses = logged_responses(groups[place], rewards_of_prompt, ratios[place])
        prompt = groups[place].prompt.text
        logged.append(LoggedGroup(update.number, prompt, finite_or_none(kls[place]), responses))
    return logged


def logged_responses(
    group: Group, rewards: Mapping[str, list[float]], log_ratios: list[float]
) -> list[LoggedResponse]:
    """The responses to one prompt. rewards: `reward` and its parts, [K] each. log_ratios: [K]."""
    logged = []
    for k, response in enumerate(group.responses):
        parts = {
            name: finite_or_none(values[k]) for name, values in rewards.items() if name != "reward"
        }
        logged.append(
            LoggedResponse(
                text=response.text,
                ids=list(response.ids),
                reward=rewards["reward"][k],
                parts=parts,
                log_ratio=finite_or_none(log_ratios[k]),
                finished=response.finished,
                turns=[list(turn) for turn in response.turns],
            )
        )
    return logged
