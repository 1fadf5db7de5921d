"""Loads what a stage's configuration names: the policy and its sampler, the reference, the rewards."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from transformers.utils.logging import get_logger

from fastp3o.config import EnvironmentConfig, PolicyConfig, SamplerConfig, StageConfig
from fastp3o.data.tokens import Continuation, tokenise
from fastp3o.errors import UserError
from fastp3o.models.ends import checkpoint_ends, write_ends
from fastp3o.models.loading import load_policy, load_reward_model
from fastp3o.models.merging import has_adapter, parted
from fastp3o.models.overflow import Overflow, OverflowsError
from fastp3o.models.packable import trial_overflow
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.quantized import quantized_layers
from fastp3o.models.reference import InContext, MovingReference, NoReference, Reference, SecondModel, WithoutAdapters
from fastp3o.models.sampling_copy import SamplingCopy
from fastp3o.models.sharding import loading_device
from fastp3o.models.tokenizer import require_same_vocabulary
from fastp3o.models.trainable import choose_trainable
from fastp3o.objectives.config.base import OnlineConfig
from fastp3o.objectives.config.distillation import DistillationConfig
from fastp3o.rewards.cascade import Cascade
from fastp3o.rewards.config import cascaded, short_names
from fastp3o.rewards.environment import EnvironmentReward
from fastp3o.rewards.function import FunctionReward
from fastp3o.rewards.model import ModelReward
from fastp3o.rewards.remote import RemoteReward
from fastp3o.rewards.reward import Reward, WeightedSum, load_reward
from fastp3o.rollouts.cache import available_memory, return_unused_memory
from fastp3o.rollouts.engine_sampler import EngineSampler, named_sampler
from fastp3o.rollouts.groups import Ends, Group, Prompt, Sampler, make_prompts, sampling_settings
from fastp3o.rollouts.turns.environment import load_environments
from fastp3o.rollouts.turns.kept import KeptTurns
from fastp3o.rollouts.turns.observation import chat_observations, plain_observations
from fastp3o.rollouts.turns.sampler import TrajectorySampler
from fastp3o.rollouts.turns.served import ServedTrajectories
from fastp3o.rollouts.vllm.publisher import Publisher
from fastp3o.rollouts.vllm.sampler import VLLMSampler
from fastp3o.runtime.context import Context
from fastp3o.runtime.precision import choose_precision, wider_precision
from fastp3o.runtime.processes import on_every_process, on_main_process
from fastp3o.training.row_length import fit_rows
from fastp3o.training.setup import holding

if TYPE_CHECKING:  # a run imports its own stage only
    from fastp3o.evaluation.config import SamplingConfig
    from fastp3o.objectives.config.preferences import PreferenceConfig

logger = get_logger(__name__)
# Bytes per parameter of a training policy with its reference and reward model: masters, moments, weights.
WHILE_TRAINING = 16
# Options of reading prompts that a reward model of another vocabulary has in common with the policy.
READ_ANEW = ("max_prompt_tokens", "max_characters", "chat_template_kwargs")


def load_trained(
    context: Context, config: StageConfig, load: Callable[..., PackedModel]
) -> tuple[PackedModel, Context]:
    """The model that trains, whose settings say how its responses end, and its context (`holding`), whose tokenizer
    gets another token for padding where a reward model needs one. load: `load_policy` or `load_reward_model`.
    """
    as_stored = not config.lora_rank  # adapters get the dtype of the weights that are there
    options = {"trust_remote_code": config.trust_remote_code, "quantize": config.quantize, "as_stored": as_stored}
    model = load(config.model, **options).train()
    context = holding(context, config, model)
    ends = checkpoint_ends(config.model, context.tokenizer, trust_remote_code=config.trust_remote_code)
    write_ends(model.model, context.tokenizer, ends)
    if isinstance(config, SamplerConfig):
        model.temperature = config.temperature
        # The saved generation_config.json says how the policy is sampled.
        model.model.generation_config.update(
            do_sample=True,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p or None,
            repetition_penalty=None,
        )
    model.check_reach(config.longest_sequence)
    choose_trainable(model, config)
    if config.gradient_checkpointing:
        model.recompute_activations()
    if config.compile_layers:
        model.compile_layers()
    fit_rows(context, config, model)
    return model, context


def load_held(
    context: Context, load: Callable[..., PackedModel], name: str, *, dtype: torch.dtype, **options: Any
) -> PackedModel:
    """A model that does not train, before it is spread over the processes: with weights in this dtype, or wider ones
    where that is fp16, which nobody has named and which does not hold it in a trial of a few tokens. All processes get
    the same dtype. load: `load_policy` or `load_reward_model`, with options. Raises UserError if fp16 was named.
    """
    if dtype != torch.float16:
        return load(name, dtype=dtype, **options)
    # Only fp16 has a range that a model may leave: it is tried on a few tokens.
    loaded: list[PackedModel] = []

    def tried() -> Overflow | None:
        try:
            loaded.append(load(name, dtype=dtype, **options))
            return trial_overflow(loaded[0], context.device)
        except OverflowsError as error:
            return error.overflow

    overflow = on_main_process(context.accelerator, tried)
    if overflow is None or not (overflow.happened or context.precision.automatic):
        return loaded[0] if loaded else load(name, dtype=dtype, **options)
    if not context.precision.automatic:
        raise UserError(f"{name} overflows fp16: {overflow}: --precision auto loads it in another")
    loaded.clear()  # two of them may not fit
    wider = wider_precision(trains=False)
    context.accelerator.print(f"--precision auto: {name} in {wider.name}, since in a trial {overflow}")
    return load(name, dtype=wider.weights, **options)


# --- sampling -------------------------------------------------------------------------------------------------------


@dataclass
class SampledModel:
    """A model to sample from. copy: sampled in its place, if it is spread over processes, if its weights are finer than
    its passes, or if it has adapters; None if it is sampled itself. optional: a copy that memory may have no room for.
    publisher: brings it to servers, which sample in the place of both; None without.
    """

    model: PackedModel
    copy: SamplingCopy | None
    publisher: Publisher | None = None
    optional: bool = False

    @cached_property
    def has_room(self) -> bool:
        """Whether memory has room for the copy beside all that trains and rewards: asked at the first rollout."""
        assert self.copy is not None
        fits = not self.optional or self.copy.bytes < available_memory(self.copy.memory.device)
        if not fits:
            logger.warning(
                f"no room to merge adapters ({self.copy.bytes / 1e9:.1f} GB): rollouts are slower when they are not"
            )
        return fits

    def gathered(self, build: Callable[[PackedModel], Sampler]) -> Sampler:
        """A sampler of the copy, for which each process gathers the model's weights once a call. build: of a model."""
        copy, of_model = self.copy, build(self.model)
        if copy is None:
            return of_model
        of_copy = build(copy.model)

        def sample(prompts: list[Prompt], responses_per_prompt: int, seed: int) -> list[Group]:
            if not self.has_room:
                return of_model(prompts, responses_per_prompt, seed)
            return_unused_memory(copy.memory.device)
            with copy.gathered(self.model):
                groups = of_copy(prompts, responses_per_prompt, seed)
            return_unused_memory(copy.memory.device)
            return groups

        return sample


def sampled_model(
    config: PolicyConfig,
    policy: PackedModel,
    context: Context,
    bytes_per_parameter: int = WHILE_TRAINING,
    **publishing: Any,
) -> SampledModel:
    """The policy, which is not on its device yet, and the copy or the servers that are sampled in its place, if there
    must be any. bytes_per_parameter: of all that is spread over the processes. publishing: arguments of a Publisher.
    """
    # Servers get whole models: adapters are merged into the weights that go there.
    if config.sampler == "vllm":
        if not policy.mergeable:
            raise UserError("--sampler vllm gets merged adapters, and those of --lora_targets cannot be merged")
        if has_adapter(policy.model) and parted(policy.model):
            tied = "--sampler vllm: servers have one matrix for embeddings and head"
            raise UserError(f"{tied}, and --lora_targets adapts one of these: name other layers")
        return SampledModel(policy, None, Publisher(context, config, policy, **publishing))
    # Quantized weights are sampled as they are, so that rollouts are the policy's own.
    if quantized_layers(policy):
        return SampledModel(policy, None)
    accelerator, precision, _, mesh, *_ = context
    on_gpu = context.device.type == "cuda"
    # A CPU gains nothing, and samples from the weights themselves.
    dtype = precision.autocast if on_gpu and precision.autocast else precision.weights
    # With adapters merged into its weights a GPU samples faster.
    merges = on_gpu and has_adapter(policy.model) and policy.mergeable
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    memory = available_memory(context.device)
    replicas = mesh["replicas"].size() if mesh is not None and "replicas" in (mesh.mesh_dim_names or ()) else 1
    if mesh is None:
        # Next to weights in half precision a copy without adapters takes as much again.
        fits = parameters * (precision.weights.itemsize + dtype.itemsize) < memory
        if dtype == precision.weights and not (merges and fits):
            return SampledModel(policy, None)
    # Spread weights are gathered in each process for a round of rollouts, beside what stays spread.
    elif bytes_per_parameter * parameters * replicas // mesh.size() + parameters * dtype.itemsize >= memory:
        accelerator.print("warning: rollouts need a whole policy in each process; --sampler vllm moves them to servers")
    copy = SamplingCopy(policy, context.device, dtype, merges=merges)
    return SampledModel(policy, copy, optional=mesh is None and dtype == precision.weights)


def sampled_frozen(config: PolicyConfig, frozen: PackedModel, context: Context, *sizes: int) -> SampledModel:
    """`sampled_model` of a policy that does not train, which may be in another precision than the run's."""
    if frozen.model.dtype != context.precision.weights:
        names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
        context = context._replace(precision=choose_precision(names[frozen.model.dtype], "fp32"))
    return sampled_model(config, frozen, context, *sizes)


def policy_sampler(
    config: PolicyConfig, policy: SampledModel, context: Context, batch_size: int, *, greedy: bool = False
) -> Sampler:
    """Builds the policy's sampler. batch_size: prompts at once in its own process. greedy: the most likely tokens."""
    longest, tokenizer, settings = config.max_response_tokens, context.tokenizer, sampling_settings(config)
    settings = replace(settings, top_k=1) if greedy else settings
    # Responses of one turn.
    if not isinstance(config, EnvironmentConfig) or not config.environment:
        if policy.publisher is not None:
            return VLLMSampler(policy.publisher, tokenizer, max_response_tokens=longest, settings=settings)
        options: dict[str, Any] = {"max_response_tokens": longest, "batch_size": batch_size}
        return policy.gathered(lambda model: named_sampler(config, model, tokenizer, settings, **options))
    # Responses of several turns, which an environment answers.
    if policy.publisher is not None:
        tokenizer = deepcopy(tokenizer)  # threads that share one change its settings for each other
    ends = Ends(policy.model.model, tokenizer, settings.stops).ids
    role = config.observation_role
    variables = config.template_settings, context.clock
    observe = plain_observations(tokenizer) if role == "text" else chat_observations(tokenizer, role, ends, *variables)
    environments = load_environments(config)
    options = {"max_turns": config.max_turns, "longest": longest}
    if policy.publisher is not None:
        turns = VLLMSampler(policy.publisher, tokenizer, max_response_tokens=config.max_turn_tokens, settings=settings)
        return ServedTrajectories(turns, tokenizer, environments, observe, **options)
    # First turns share their prompt among K responses; from then on each trajectory is a context of its own.
    contexts = batch_size * getattr(config, "responses_per_prompt", 1)

    def trajectories(model: PackedModel) -> Sampler:
        build = partial(named_sampler, config, model, tokenizer, settings, max_response_tokens=config.max_turn_tokens)
        first, further = (build(batch_size=size) for size in (batch_size, contexts))
        turn_options = dict(options)
        # The engine keeps keys and values from turn to turn; other samplers compute a trajectory again each turn.
        if isinstance(first, EngineSampler):
            kept = KeptTurns(first, further, longest)
            first, further, turn_options["end"] = kept, kept.go_on, kept.end
        sampler = TrajectorySampler(first, further, tokenizer, environments, observe, **turn_options)
        # Processes need different numbers of turns: they meet at the end of a call alone, also after an error.
        return lambda *call: on_every_process(context.accelerator, lambda: sampler(*call))

    return policy.gathered(trajectories)


# --- rewards --------------------------------------------------------------------------------------------------------


def load_rewards(
    context: Context, config: "OnlineConfig | PreferenceConfig", prompts: Dataset, eval_prompts: Dataset | None
) -> dict[str, Reward]:
    """`reward`, and `gold`, which evaluations have, where the configuration names them."""
    rewards: dict[str, Reward] = {}
    if config.rewards:
        loaded = [load_named_reward(context, config, name, prompts) for name in config.rewards]
        named = dict(zip(short_names(config.rewards), loaded, strict=True))
        rewards["reward"] = loaded[0] if config.weights == [1.0] else WeightedSum(named, config.weights)
    if config.gold_reward and eval_prompts is not None:
        rewards["gold"] = load_named_reward(context, config, config.gold_reward, eval_prompts)
    return rewards


def load_named_reward(
    context: Context,
    config: "OnlineConfig | PreferenceConfig | SamplingConfig",
    name: str,
    examples: Dataset,
    *,
    passes: bool = False,
) -> Reward:
    """Loads the reward of this name. An endpoint, and a function unless a run continues, is tried on the first example
    before anything is written. passes: whether it may leave responses to the next one of a cascade.
    """
    # `A else B`: each part but the last may leave responses to the next one.
    parts, reading = cascaded(name), config.reading
    if len(parts) > 1:
        load = partial(load_named_reward, context, config)
        rewards = [load(part, examples, passes=part is not parts[-1]) for part in parts]
        return Cascade(dict(zip(short_names(parts), rewards, strict=True)))
    reward = load_reward(
        name,
        context.tokenizer,
        device=context.device,
        dtype=context.precision.weights,
        load=partial(load_held, context, load_reward_model),
        packing=config.packing,
        mesh=context.mesh,
        offload=config.offload,
        trust_remote_code=config.trust_remote_code,
        remote=config,
        reading={name: reading[name] for name in READ_ANEW} | {"clock": context.clock},
    )
    if isinstance(reward, RemoteReward | FunctionReward | EnvironmentReward):
        reward.passes = passes
    elif passes:
        raise UserError(f"the reward {name} answers for every response: `else` after it has no effect")
    # Tried before the run writes anything: a misspelt column or a server that is down ends it at once.
    if isinstance(reward, RemoteReward) or (
        isinstance(reward, FunctionReward) and not getattr(config, "resume", False)
    ):
        on_main_process(context.accelerator, partial(reward.check, *make_prompts(examples[:1])))
    if isinstance(reward, ModelReward) and reward.has_other_template:
        context.accelerator.print(
            f"the reward model {name} has the policy's vocabulary and another chat template: it scores messages as the "
            "policy's template writes them"
        )
    # In another vocabulary, lengths are unknown until there are texts.
    if isinstance(reward, ModelReward) and reward.shares_vocabulary:
        # One that was stopped by a text gets an end.
        reward.model.model.check_reach(config.longest_sequence + bool(config.stops))
    return reward


# --- the reference --------------------------------------------------------------------------------------------------


def load_reference(
    context: Context, config: OnlineConfig, policy: PackedModel
) -> tuple[Reference, SampledModel | None]:
    """Loads the loop's reference, which may move, if it needs one; and the same model to sample from, if a mixture is
    sampled.
    """
    if not config.needs_reference:
        return NoReference(), None
    # A fixed reference costs least: with LoRA it is the policy without its adapters.
    if not config.from_mixture and not config.reference_moves:
        return load_fixed_reference(context, config, policy), None
    # One that is sampled, or moves, has weights of its own.
    frozen = load_reference_model(context, config)
    sampled = sampled_frozen(config, frozen, context) if config.from_mixture else None
    second = SecondModel(frozen, context.device, context.mesh, offload=config.offload)
    if config.reference_moves:
        return MovingReference(second, every=config.reference_every, decay=config.reference_decay), sampled
    return second, sampled


def in_context(context: Context, config: OnlineConfig, reference: Reference) -> Reference:
    """The reference as it sees --teacher_context. Raises ValueError if its positions end too soon for that."""
    if not isinstance(config, DistillationConfig) or not config.teacher_context:
        return reference
    (ids,) = tokenise(context.tokenizer, [config.teacher_context], control=True)
    reference.model.check_reach(config.longest_sequence, context=len(ids))
    moved = Continuation(context.tokenizer).moved
    return InContext(reference, ids, context.tokenizer.bos_token_id, config.packing, moved)


def load_fixed_reference(context: Context, config: "OnlineConfig | PreferenceConfig", policy: PackedModel) -> Reference:
    """The policy as it was when training began: a second model, or a LoRA policy without its adapters."""
    if config.lora_rank and not config.reference:
        return WithoutAdapters(policy)
    return SecondModel(load_reference_model(context, config), context.device, context.mesh, offload=config.offload)


def load_reference_model(context: Context, config: "OnlineConfig | PreferenceConfig") -> PackedModel:
    """The model that the policy's KL is measured against, before it is spread over the processes."""
    if config.reference:
        remote = config.trust_remote_code
        require_same_vocabulary(config.reference, config.model, context.tokenizer, trust_remote_code=remote)
    frozen = load_frozen_policy(context, config, config.reference or config.model)
    if config.compile_layers:
        frozen.compile_layers()
    return frozen


def load_frozen_policy(context: Context, config: PolicyConfig, name: str) -> PackedModel:
    """A policy that does not train, before it is spread over the processes."""
    frozen = load_held(
        context,
        load_policy,
        name,
        device=loading_device(context.device, context.mesh),
        dtype=context.precision.weights,
        trust_remote_code=config.trust_remote_code,
    )
    frozen.temperature = config.temperature
    frozen.check_reach(config.longest_sequence)
    return frozen
