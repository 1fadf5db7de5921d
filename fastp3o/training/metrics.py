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
from fastp3o.objectives.config.base import RolloutLogConfig
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


@dataclass(frozen=True)
class Measures:
    """What metrics mean in a run.

    from_policy: the responses to a prompt that the policy has sampled, of which the KL is
    measured; all of them if all are a mixture's. to_reference: whether the KL to a reference is
    measured. has_rewards: without rewards, the reward is minus the KL to the reference.
    reads_rewards: whether the loss reads rewards. tokens_per_row: of a full packed row.
    """

    from_policy: slice
    to_reference: bool
    has_rewards: bool
    reads_rewards: bool
    tokens_per_row: int


# --- the report -----------------------------------------------------------------------------------


def report_update(
    run: Run, objective: Objective, update: Update, measures: Measures, logs: RolloutLogConfig
) -> None:
    """Logs an update's metrics, warns of what they show, and logs or prints its rollouts in the
    updates that `logs` names.
    """
    # 1. Metrics, which are the means over all processes.
    if not measures.has_rewards:
        update = rewarded_by_reference(run.optimizer, update)
    metrics, log_ratios = update_metrics(run.optimizer, update, measures)
    metrics |= objective.adaptive_metrics | update.round_metrics
    metrics |= row_metrics(run.accelerator, update, measures.tokens_per_row)
    beside_bar = tuple(name for name in ("reward", "kl", "response_length") if name in metrics)

    # 2. Warnings come before the line of the update.
    warn_of_noise(run, objective, metrics)
    if outlier := objective.scaler.outlier:
        run.warn_once("outlier", outlier_warning(outlier))
    if metrics["tied_prompts"] == 1 and measures.reads_rewards:
        run.warn_once("tied", TIED)
    run.report(update.number, metrics, tokens=metrics["response_tokens"], shown=beside_bar)

    # 3. Rollouts: in the log, and some on the console.
    if logs.log_rollouts and update.number % logs.log_rollouts == 0:
        places = logged_places(update.batch.groups, logs.log_rollouts_prompts)
        table = gather_table(run.optimizer, update, log_ratios)
        logged = logged_groups(update, places, table, measures.from_policy)
        run.reporter.rollouts(update.number, logged)
    is_last = update.number == run.steps.last
    if logs.samples_every and (is_last or update.number % logs.samples_every == 0):
        print_samples(run, update)


def rewarded_by_reference(optimizer: Optimizer, update: Update) -> Update:
    """An update without rewards, with minus the KL to the reference, as it was sampled, in their
    place.
    """
    rewards = torch.cat([batch.ref_logprobs - batch.old_logprobs for batch in update.microbatches])
    table = gather_table(optimizer, update, rewards.cpu())
    return replace(update, batch=replace(update.batch, rewards={"reward": table}))


def print_samples(run: Run, update: Update) -> None:
    """Prints the responses to an update's first prompts, with their rewards."""
    groups = update.batch.groups[:SAMPLED_PROMPTS]
    prompts = [group.prompt.text for group in groups]
    responses = [[response.text for response in group.responses] for group in groups]
    rewards = update.batch.rewards["reward"][: len(groups)].tolist()
    run.reporter.samples(update.number, prompts, responses, rewards)


# --- warnings -------------------------------------------------------------------------------------


TIED = "all responses to every prompt got the same reward, so this update has no gradient (tied_prompts is 1)"


def warn_of_noise(run: Run, objective: Objective, metrics: Mapping[str, float]) -> None:
    """Warns if rounding alone moves ratios by much of their clip range."""
    clip_range = objective.clip_range(metrics["response_length"])
    noise = metrics.get("ratio/noise", 0.0)
    if clip_range is not None and noise > TOLERATED * clip_range:
        precision, device = run.optimizer.precision.name, run.accelerator.device.type
        run.warn_once("ratio/noise", noise_warning(noise, clip_range, precision, device))


def outlier_warning(outlier: Outlier) -> str:
    return (
        f"warning: a reward, or a difference of two, is {outlier.distance:.3g}, far beyond the others: it counts as "
        f"{outlier.bound:.3g} in the deviation that divides rewards (--reward_scaling)"
    )


# --- metrics --------------------------------------------------------------------------------------


def update_metrics(
    optimizer: Optimizer, update: Update, measures: Measures
) -> tuple[dict[str, float], Tensor]:
    """Metrics, and log π_old(y|x) − log π_ref(y|x) of this process's responses, [p, K] fp32 on the
    CPU.

    Metrics are means over all processes: of their rollouts as they were sampled, and of the
    optimizer steps on them.

    reward: unscaled, less penalties. reward_difference: mean |ri − rj| of pairs. tied_prompts:
    share of prompts whose rewards are all equal. kl: mean log π_old(y|x) − log π_ref(y|x), in nats
    per response; absent, and NaN in the table, without a reference. entropy: −mean log π_old of the
    responses' tokens, in nats per token. missing_eos: share without an end-of-sequence. Others:
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
    tokens = lengths(update.batch.groups).sum()
    entropy = -old_token_logprobs.sum() * shares / tokens
    on_device = {"entropy": entropy, **update.logprob_metrics}
    if measures.to_reference:
        responses = update.batch.rewards["reward"][:, measures.from_policy].numel()
        on_device["kl"] = log_ratios[:, measures.from_policy].sum() * shares / responses
    else:
        log_ratios = torch.full_like(log_ratios, torch.nan)
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


def row_metrics(accelerator: Accelerator, update: Update, tokens_per_row: int) -> dict[str, float]:
    """How full this process's packed rows are; of several processes also `balance`."""
    rows = [microbatch.row for microbatch in update.microbatches]
    metrics = {"packing_efficiency": efficiency(rows, tokens_per_row)}
    if accelerator.num_processes > 1:
        metrics["balance"] = balance(accelerator, update.minibatches)
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


def logged_places(groups: Sequence[Group], count: int) -> list[int]:
    """The places of the groups that are logged, in order; 0 logs all. Those whose prompts have the
    smallest hashes are taken, so that a prompt that is logged in one epoch tends to be in the next.
    """
    places = range(len(groups))
    if not count:
        return [*places]
    hashes = [hashlib.sha256(group.prompt.text.encode()).digest() for group in groups]
    by_hash = sorted(places, key=lambda place: hashes[place])
    return sorted(by_hash[:count])


def logged_groups(
    update: Update, places: Sequence[int], log_ratios: Tensor, from_policy: slice
) -> list[LoggedGroup]:
    """The groups of an update at these places, as they are logged. log_ratios: of all processes'
    responses, [P, K]. from_policy: as in `Measures`.
    """
    kls = log_ratios[:, from_policy].mean(dim=1).tolist()
    ratios = log_ratios.tolist()
    rewards = {name: table.tolist() for name, table in update.batch.rewards.items()}
    logged = []
    for place in places:
        group = update.batch.groups[place]
        rewards_of_prompt = {name: values[place] for name, values in rewards.items()}
        responses = logged_responses(group, rewards_of_prompt, ratios[place])
        kl = finite_or_none(kls[place])
        logged.append(LoggedGroup(update.number, group.prompt.text, kl, responses))
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
