"""The parts of the online loop, built from its configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from datasets import Dataset
from torch import Tensor, nn

from fastp3o.data.loading import load_demonstrations, load_prompts
from fastp3o.evaluation.evaluate import Evaluation
from fastp3o.models.ends import checkpoint_ends
from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import MovingReference, Reference, SecondModel
from fastp3o.objectives.base import LossAndMetrics, Microbatch, Minibatches, Objective
from fastp3o.objectives.config.base import MixtureConfig, OnlineConfig
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.rewards.comparisons import JudgedPairs
from fastp3o.rewards.load import load_rewards
from fastp3o.rewards.reward import (
    Reward,
    asked_of_evaluations,
    asked_of_records,
    logged_means,
    penalized_rewards,
    require_finite_rewards,
    single_rewards,
)
from fastp3o.rollouts.engine_sampler import rollout_bytes
from fastp3o.rollouts.groups import Group, Sampler, sampling_settings
from fastp3o.rollouts.mixture import MixtureSampler, partly_from_mixture
from fastp3o.rollouts.plan import SampledModel, policy_sampler, sampled_model
from fastp3o.run.checkpoint import RunState
from fastp3o.run.run import Run, Steps
from fastp3o.runtime.context import Caller, Context
from fastp3o.training.batch import RolloutBatch
from fastp3o.training.build import in_context, load_reference, load_reference_model, load_trained
from fastp3o.training.kl_per_update import LearningRateSearch, Search
from fastp3o.training.logprob_gaps import Comparison, evaluated_again, measures_noise
from fastp3o.training.metrics import Measures
from fastp3o.training.microbatches import Passes, RowLogprobs, add_gradients, counted
from fastp3o.training.old_logprobs import old_logprobs
from fastp3o.training.pretraining_mix import PretrainingMix
from fastp3o.training.rivals import Anchors, with_rival
from fastp3o.training.rollout_buffer import RolloutBuffer
from fastp3o.training.setup import HeldOut, Loader, load_examples, load_held_out, make_context

# --- what the loop calls --------------------------------------------------------------------------


@dataclass(frozen=True)
class OnlineLoop:
    """What the online loop works with, and those of its steps that only need what stays the same
    from update to update.

    run: folder, logs, checkpoints, and the optimizer. reference: log π_ref of rows. objective: the
    loss, and what comes before and after an update's steps. buffer: the rollouts of each update.
    reward: of groups, [P, K]. pretraining: the backward passes of a pretraining mix. search: for
    the learning rate, from update to update.
    """

    config: OnlineConfig
    run: Run
    policy: PackedModel
    reference: Reference
    objective: Objective
    buffer: RolloutBuffer
    reward: Reward
    pretraining: PretrainingMix | None
    search: Search

    def score(self, groups: list[Group]) -> RolloutBatch:
        """The batch of all processes' groups with rewards, less penalties. groups: those that this
        process has sampled. Raises NotFiniteError on all processes if a reward of one is not
        finite.
        """
        config, accelerator = self.config, self.run.accelerator
        by_token = config.process_rewards
        rewards = penalized_rewards(
            self.reward, groups, config, config.max_response_tokens, by_token=by_token
        )
        require_finite_rewards(accelerator, self.reward, groups, rewards["reward"])
        return RolloutBatch.gathered(accelerator, groups, rewards)

    def old_logprobs(self, groups: list[Group]) -> RowLogprobs | None:
        """A function for the old log-probs of an update's rows; None where the loss computes them."""
        return old_logprobs(
            self.config.old_logprobs,
            self.objective,
            self.policy,
            groups,
            steps=self.config.steps_per_update,
            has_dropout=self.config.lora_dropout > 0,
        )

    def comparison(
        self, update: int, groups: list[Group], minibatches: Minibatches, first: Passes[Microbatch]
    ) -> Comparison:
        """What of an update's rollouts is compared with the policy. first: the passes of the
        update's first step, which alone computes the policy's log-probs if the old ones are the
        sampler's.
        """
        from_sampler = self.config.old_logprobs == "sampler"
        compared = counted(first) if from_sampler else [*chain.from_iterable(minibatches)]
        again = (
            evaluated_again(self.policy, groups, compared[0].row)
            if measures_noise(update)
            else None
        )
        return Comparison(groups, compared, again)

    def measured(self, update: int, comparison: Comparison) -> dict[str, Tensor]:
        """Metrics of a comparison, 0-d, once the policy's log-probs are known. Raises
        OtherWeightsError on every process if servers sampled from other weights than the policy's.
        """
        gaps = comparison.metrics()
        self.buffer.require_same_policy(update, comparison.groups, gaps)
        self.search.note_noise(self.run.accelerator, gaps)
        if not (self.config.rounds_ahead or self.config.truncates):
            gaps.pop("sampler_kl", None)  # rounding alone
        return gaps

    def learning_rate_search(
        self, update: int, minibatches: Minibatches, steps: int
    ) -> LearningRateSearch:
        """The search for a learning rate within an update; idle without `--kl_per_update`."""
        return LearningRateSearch(
            self.run.optimizer,
            self.config.kl_per_update,
            self.search,
            update,
            minibatches,
            steps,
            self.config.old_logprobs,
        )

    def add_gradients(
        self,
        passes: Passes[Microbatch],
        loss: Callable[[nn.Module, Microbatch, float | Tensor], LossAndMetrics],
    ) -> dict[str, Tensor]:
        """Makes a step's backward passes; those of the pretraining mix, too. Returns loss and
        metrics.
        """
        return add_gradients(self.run.optimizer, passes, loss, further_passes=self.pretraining)

    def sum_over_processes(self, sums: Tensor) -> Tensor:
        return self.run.accelerator.reduce(sums, reduction="sum")

    def round_metrics(self, update: int, batch: RolloutBatch) -> dict[str, float]:
        """Metrics of an update's rollouts, and of what reward functions logged about them."""
        metrics = self.buffer.metrics(update) | logged_means({"reward": self.reward})
        if self.config.dynamic_sampling:
            metrics["sampled_again"] = batch.sampled_again / len(batch.groups)
        return metrics

    @property
    def measures(self) -> Measures:
        """What the metrics of this run mean."""
        config = self.config
        return Measures(
            from_policy=slice(config.responses_per_prompt - config.from_mixture or None),
            to_reference=config.needs_reference,
            has_rewards=bool(config.rewards),
            reads_rewards=config.reads_rewards,
            tokens_per_row=config.packing.tokens_per_row,
        )


# --- building it ----------------------------------------------------------------------------------


def set_up(config: OnlineConfig, caller: Caller | None) -> OnlineLoop:
    """Loads data and models, restores the state of a run that is resumed, and checks all that can
    be checked first.
    """
    # Processes, arithmetic and tokenizer. A remainder of 0 is a multiple of any number of
    # processes.
    ptx_batch_size = config.ptx_batch_size if config.ptx_data else 0
    context = make_context(
        config,
        "fp16",
        caller,
        prompts_per_update=config.prompts_per_update,
        ptx_batch_size=ptx_batch_size,
    )

    # Data come before models, so that an error in them is reported within seconds.
    objective = config.build()
    prompts, held_out, texts = load_data(context, config)
    print_warnings(context, config, len(prompts))

    # The policy, whole and on the CPU. What is sampled in its place, a copy or servers, is chosen
    # before the optimizer spreads it over the processes and takes its memory.
    policy, context, config = load_trained(context, config, partial(load_policy, trains=True))
    sampled = sampled_model(
        config,
        policy,
        context,
        version=lambda: optimizer.steps,  # servers are asked for it once there is an optimizer
        # Where `RolloutBuffer.require_same_policy` cannot tell.
        probes_always=bool(config.rounds_ahead) or config.truncates,
        tolerant=config.reads_sampler,
        logprobs_as_drawn=config.temperature != 1 or config.truncates,
        interrupts=config.interrupt_rollouts,
    )
    # A critic, if the objective has one, is there before the optimizer lists what trains.
    objective.add_to(policy)

    # Rewards: a function or an endpoint is tried on the first example, so that a broken one ends
    # the run before anything is sampled.
    rewards = load_rewards(
        context,
        config,
        config,
        prompts,
        held_out.examples,
        comparisons=config.comparisons,
        responses_per_prompt=config.responses_per_prompt,
        continues=config.resume,
    )
    # Distillation needs no reward. The loop, which scales rewards, gets zeros then.
    reward = rewards.get(
        "reward", lambda groups: torch.zeros(len(groups), config.responses_per_prompt)
    )

    # The optimizer wraps the policy: it spreads the weights over the processes, and makes fp32
    # masters of those that train.
    steps = config.updates * config.steps_per_update
    optimizer: Optimizer = Optimizer(
        context.accelerator,
        policy,
        context.precision,
        config,
        steps,
        objective.learning_rates,
        context.mesh,
    )

    # log π_ref comes from a second model, which may move, or from the policy without its adapters;
    # or nothing needs it.
    reference, sampled_reference = load_reference(context, config, policy)
    # A reference that moves is a part of the run's state; a fixed one is read again.
    tensors = reference.tensors if isinstance(reference, MovingReference) else dict

    # What samples. Some objectives also sample a mixture of policy and reference, which needs both
    # on the device.
    sampler = policy_sampler(config, sampled, context, config.rollout_batch_size)
    if isinstance(config, MixtureConfig) and sampled_reference is not None:
        sampler = with_mixture(context, config, config.mixture, sampler, sampled, sampled_reference)
    # A reward that compares responses may compare each with one of the reference's (`--comparisons
    # anchor`), sampled from the same model.
    if config.comparisons == "anchor" and sampled_reference is not None:
        anchors = Anchors(
            policy_sampler(config, sampled_reference, context, config.rollout_batch_size),
            config.seed,
        )
        for single in single_rewards(rewards).values():
            if isinstance(single, JudgedPairs):
                single.anchor = anchors
    buffer = RolloutBuffer(context, config, config, sampler, prompts, seed=config.seed)

    # From here on the reference sees the teacher's context. Distillation asks it for more than
    # log-probs.
    reference = in_context(context, config, reference)
    objective.reference_values = reference.map_rows
    evaluate = make_evaluation(
        context, config, sampled, reference if config.needs_reference else None, rewards, held_out
    )

    # The run restores a resumed state into all of these, and checks that data and options are those
    # of the state.
    search = Search(config.learning_rate)
    run = Run(
        context,
        config,
        optimizer,
        Steps(objective.label, "update", config.updates),
        evaluate=evaluate,
        data={"prompts": prompts, "eval_prompts": held_out.examples, "ptx_data": texts},
        state=RunState({**objective.stateful_parts, "kl_per_update": search}, tensors, buffer),
    )
    # A pretraining mix adds its backward passes to those of each step.
    pretraining = None
    if texts is not None:
        pretraining = PretrainingMix(optimizer, config, config.seed, config.packing, texts)
    return OnlineLoop(
        config, run, policy, reference, objective, buffer, reward, pretraining, search
    )


# --- parts that need several of these -------------------------------------------------------------


def with_mixture(
    context: Context,
    config: OnlineConfig,
    weight: float,
    sampler: Sampler,
    policy: SampledModel,
    reference: SampledModel,
) -> Sampler:
    """Samples the last responses to each prompt from the mixture of policy and reference, the
    others by `sampler`. weight: the reference's, within 0 and 1.
    """

    def mixture(model: PackedModel, other: PackedModel) -> Sampler:
        return MixtureSampler(
            policy=model,
            other=other,
            weight=weight,
            tokenizer=context.tokenizer,
            settings=sampling_settings(config),
            max_response_tokens=config.max_response_tokens,
            batch_size=config.rollout_batch_size,
            memory=rollout_bytes(config),
        )

    mixed = policy.gathered(lambda model: reference.gathered(lambda other: mixture(model, other)))
    return partly_from_mixture(sampler, mixed, config.from_mixture)


def print_warnings(context: Context, config: OnlineConfig, total: int) -> None:
    """Warns of idle processes, of a loss that truncated rollouts bias, and of few prompts. total:
    of prompts.
    """
    # Somebody has set the size of updates alone, and the usual size of minibatches does not divide
    # it.
    usual = config.__dataclass_fields__["prompts_per_minibatch"].default
    if config.minibatch_yields and usual and config.prompts_per_minibatch != usual:
        context.accelerator.print(
            f"--prompts_per_minibatch is {config.prompts_per_minibatch} in place of {usual}, to divide "
            f"--prompts_per_update {config.prompts_per_update}"
        )
    # A prompt's responses train in one process, or in the few that compute layers together.
    processes = context.accelerator.num_processes
    idle = processes - config.prompts_per_minibatch * config.tensor_parallel
    if idle > 0:
        context.accelerator.print(
            f"--prompts_per_minibatch is {config.prompts_per_minibatch}, so {idle} of {processes} "
            "processes have nothing to train on in each step: a multiple of their number uses them all"
        )
    if total < config.prompts_per_update:
        context.accelerator.print(
            f"warning: --prompts_per_update ({config.prompts_per_update}) exceeds the {total} prompts, so some repeat "
            "within an update"
        )
    # An estimate over samples of another distribution than the policy's is biased, unless
    # importance weights correct it.
    corrected = config.old_logprobs == "sampler" or config.reads_sampler
    if config.truncates and config.assumes_own_samples and not corrected:
        remedies = config.sampler_correction + (
            " or --old_logprobs sampler" if config.compares_with_old else ""
        )
        context.accelerator.print(
            "warning: truncated sampling (--top_k, --top_p or --min_p) does not draw from the policy, which biases the "
            f"gradient: {remedies} corrects for that (fastp3o/objectives/off_policy.md)"
        )


# --- data and evaluations -------------------------------------------------------------------------


def load_data(context: Context, config: OnlineConfig) -> tuple[Dataset, HeldOut, Dataset | None]:
    """Prompts and those of evaluations, with the columns that rewards ask for; and texts of the
    pretraining mix.
    """

    # Rewards say which columns of the records they need.
    load: Loader = partial(load_prompts, **asked_of_records(config.rewards, config))
    prompts = load_examples(context, config, load, config.prompts, config.split, config.limit)
    load = partial(load_prompts, **asked_of_evaluations(config))
    held_out, texts = load_held_out(context, config, load, config.eval_prompts), None
    if config.ptx_data:
        # Texts of the mix end as the checkpoint's responses do.
        ends = checkpoint_ends(
            config.model_source, context.tokenizer, trust_remote_code=config.trust_remote_code
        )
        load = partial(
            load_demonstrations, max_response_tokens=config.max_response_tokens, ends=ends
        )
        texts = load_examples(context, config, load, config.ptx_data, config.split, None)
    return prompts, held_out, texts


def make_evaluation(
    context: Context,
    config: OnlineConfig,
    sampled: SampledModel,
    reference: Reference | None,
    rewards: dict[str, Reward],
    held_out: HeldOut,
) -> Evaluation | None:
    """Builds the evaluation, which measures how far the policy is from where the reference began,
    if there is one.
    """
    if held_out.examples is None:
        return None
    # A reference that moves is not where it began: evaluations have a second one, which stays.
    if config.reference_moves:
        frozen = load_reference_model(context, config)
        reference = in_context(
            context, config, SecondModel(frozen, context.device, context.mesh, offload=True)
        )
    build = partial(policy_sampler, config, sampled, context, config.eval_batch_size)
    # Rewards that compare need somebody to compare with: in evaluations a fixed rival.
    rewards, rival = with_rival(context, config, rewards, held_out.examples)
    return Evaluation(
        context.accelerator,
        sampled.model,
        reference,
        build(),
        rewards,
        held_out.examples,
        config.packing,
        config.eval_responses_per_prompt,
        config.seed,
        held_out.sets,
        build(greedy=True) if config.eval_greedy else None,
        rival,
    )
