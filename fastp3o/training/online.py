"""The parts of the online loop, built from its configuration."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from datasets import Dataset
from torch import Tensor

from fastp3o.context import Caller, Context
from fastp3o.data import load_demonstrations, load_prompts
from fastp3o.evaluation.evaluate import Evaluation
from fastp3o.models.loading import load_policy, require_same_vocabulary
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import MovingReference, Reference, SecondModel
from fastp3o.objectives.base import Objective
from fastp3o.objectives.config import MixtureConfig, OnlineConfig
from fastp3o.optimizer import Optimizer
from fastp3o.packing.share import derived_seed, examples_of_step, process_share
from fastp3o.processes import require_finite
from fastp3o.rewards.config import short_names
from fastp3o.rewards.reward import Reward, asked_columns, penalised_rewards, weighted
from fastp3o.rollouts.groups import Group, Prompt, make_prompts
from fastp3o.rollouts.sampler import Sampler
from fastp3o.rollouts.vllm.publisher import Publisher
from fastp3o.run.checkpoint import RunState
from fastp3o.run.run import Run, Steps
from fastp3o.training.build import (
    load_named_reward,
    load_reference,
    load_reference_model,
    load_trained,
    sampled_model,
)
from fastp3o.training.dynamic_sampling import DynamicSampling
from fastp3o.training.microbatches import Rewards, optimizer_step
from fastp3o.training.pretraining_mix import PretrainingMix
from fastp3o.training.rollout_buffer import RolloutBuffer
from fastp3o.training.samplers import SampledModel, note_truncation, policy_sampler, with_mixture
from fastp3o.training.setup import check_divisible, load_eval_examples, load_examples, make_context

# Sets seeds of responses that are sampled again apart from those of the order of minibatches.
AGAIN = 2**32 - 3


class Data(NamedTuple):
    """prompts, eval_prompts: with the columns that rewards ask for. texts: of the pretraining mix."""

    prompts: Dataset
    eval_prompts: Dataset | None
    texts: Dataset | None


class Online(NamedTuple):
    """The parts of the loop, in the order in which an update uses them."""

    buffer: RolloutBuffer
    score: Callable[[list[Group]], Rewards]
    resample: DynamicSampling
    objective: Objective
    policy: PackedModel
    reference: Reference
    step: Callable[..., dict[str, Tensor]]  # optimizer_step
    run: Run


def set_up(config: OnlineConfig, caller: Caller | None) -> Online:
    """Loads data and models, restores the state of a run that is resumed, and checks all that can be checked first."""
    context = make_context(config, "fp16", caller, prompts_per_update=config.prompts_per_update)
    note_idle_processes(context, config)
    note_truncation(context, config)
    if config.reference:
        require_same_vocabulary(
            config.reference, config.model, context.tokenizer, trust_remote_code=config.trust_remote_code
        )
    data = load_data(context, config)
    objective = config.build()
    policy = load_trained(config, partial(load_policy, trains=True))
    sampled = sampled_model(config, policy, context)
    objective.add_to(policy)
    rewards = load_rewards(context, config, data)
    accelerator, precision, _, mesh, _ = context
    steps = config.updates * config.inner_epochs * config.minibatches_per_update
    optimizer = Optimizer(accelerator, policy, precision, config, steps, objective.learning_rates, mesh)
    if config.sampler == "vllm":
        publisher = Publisher(
            context,
            config,
            config.longest_sequence,
            policy,
            lambda: optimizer.steps,
            # Where `RolloutBuffer.require_same_policy` cannot tell.
            probes_always=bool(config.rounds_ahead) or config.truncates,
            tolerant=bool(config.sampler_ratio_cap),
            logprobs_as_drawn=config.temperature != 1 or config.truncates,
        )
        sampled = sampled._replace(publisher=publisher)
    reference, sampled_reference = load_reference(context, config, policy)
    sampler = policy_sampler(config, sampled, context.tokenizer, config.rollout_batch_size)
    if isinstance(config, MixtureConfig) and sampled_reference is not None:
        sampler = with_mixture(sampler, config, sampled, sampled_reference, context.tokenizer)
    prompts = UpdatePrompts(context, config, data.prompts)
    buffer = RolloutBuffer(context, config, policy, sampler, prompts)
    tensors = reference.tensors if isinstance(reference, MovingReference) else dict
    run = Run(
        context,
        config,
        optimizer,
        Steps(type(objective).__name__, "update", config.updates),
        evaluate=make_evaluation(context, config, sampled, reference, rewards, data.eval_prompts),
        data={"prompts": data.prompts, "eval_prompts": data.eval_prompts, "ptx_data": data.texts},
        state=RunState(objective.stateful_parts, tensors, buffer),
    )
    score = partial(finite_rewards, context, config, rewards["reward"])
    resample = make_resampling(context, config, prompts, sampler, score)
    mix = config.ptx_coef, config.ptx_batch_size, config.packing, config.seed
    pretraining = None if data.texts is None else PretrainingMix(optimizer, data.texts, *mix)
    step = partial(optimizer_step, optimizer, further_passes=pretraining)
    return Online(buffer, score, resample, objective, policy, reference, step, run)


def note_idle_processes(context: Context, config: OnlineConfig) -> None:
    processes = context.accelerator.num_processes
    idle = processes - config.prompts_per_minibatch
    if idle > 0:
        context.accelerator.print(
            f"--prompts_per_minibatch is {config.prompts_per_minibatch}, so {idle} of {processes} "
            "processes have nothing to train on in each step: a multiple of their number uses them all"
        )


def load_data(context: Context, config: OnlineConfig) -> Data:
    """Loads all data."""
    columns = asked_columns(config.rewards, config)
    gold = [config.gold_reward] if config.gold_reward else []
    load = partial(load_prompts, columns=columns)
    prompts = load_examples(context, config, load, config.prompts, config.split, config.limit)
    load = partial(load_prompts, columns=columns | asked_columns(gold, config))
    eval_prompts = load_eval_examples(context, config, load, config.eval_prompts)
    if not config.ptx_data:
        return Data(prompts, eval_prompts, None)
    check_divisible(context.accelerator, config.ptx_batch_size, "ptx_batch_size")
    load = partial(load_demonstrations, max_response_tokens=config.max_response_tokens)
    return Data(prompts, eval_prompts, load_examples(context, config, load, config.ptx_data, config.split, None))


def load_rewards(context: Context, config: OnlineConfig, data: Data) -> dict[str, Reward]:
    """`reward`, and `gold` if there is one."""
    loaded = [load_named_reward(context, config, name, data.prompts) for name in config.rewards]
    rewards = {"reward": weighted(dict(zip(short_names(config.rewards), loaded, strict=True)), config.weights)}
    if config.gold_reward:
        assert data.eval_prompts is not None
        rewards["gold"] = load_named_reward(context, config, config.gold_reward, data.eval_prompts)
    return rewards


def make_evaluation(
    context: Context,
    config: OnlineConfig,
    sampled: SampledModel,
    reference: Reference,
    rewards: dict[str, Reward],
    eval_prompts: Dataset | None,
) -> Evaluation | None:
    """Builds the evaluation, which measures how far the policy is from where the reference began."""
    if eval_prompts is None:
        return None
    if config.reference_moves:
        frozen = load_reference_model(context, config)
        reference = SecondModel(frozen, context.device, context.mesh, offload=True)
    return Evaluation(
        context.accelerator,
        sampled.model,
        reference,
        policy_sampler(config, sampled, context.tokenizer, config.eval_batch_size),
        rewards,
        eval_prompts,
        config.packing,
        config.eval_responses_per_prompt,
        config.seed,
    )


def make_resampling(
    context: Context,
    config: OnlineConfig,
    prompts: "UpdatePrompts",
    sampler: Sampler,
    score: Callable[[list[Group]], Rewards],
) -> DynamicSampling:
    def sample_again(update: int, numbers: list[int], attempt: int) -> list[Group]:
        seed = derived_seed(config.seed, update, AGAIN, attempt)
        return sampler(prompts(update, numbers), config.responses_per_prompt, seed)

    return DynamicSampling(context.accelerator, sample_again, score, config.dynamic_sampling)


def finite_rewards(context: Context, config: OnlineConfig, reward: Reward, groups: list[Group]) -> Rewards:
    rewards = penalised_rewards(reward, groups, config, config.max_response_tokens)
    require_finite(context.accelerator, "a reward", rewards["reward"])
    return rewards


class UpdatePrompts:
    """The prompts of an update that fall to this process, numbered within the update."""

    def __init__(self, context: Context, config: OnlineConfig, examples: Dataset):
        self.accelerator, self.examples = context.accelerator, examples
        self.prompts_per_update, self.seed = config.prompts_per_update, config.seed

    def __call__(self, update: int, numbers: list[int] | None = None) -> list[Prompt]:
        """numbers: other prompts of the update than this process's."""
        chosen = examples_of_step(
            update - 1, batch_size=self.prompts_per_update, total=len(self.examples), seed=self.seed
        )
        if numbers is None:
            numbers = process_share(list(range(self.prompts_per_update)), self.accelerator)
        return make_prompts(self.examples[[chosen[number] for number in numbers]], numbers)
