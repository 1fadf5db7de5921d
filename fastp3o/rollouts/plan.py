"""Where responses are sampled: from a model itself, from a copy of it or on servers, in one turn or
in several.

`sampled_model` chooses what is sampled in a model's place, `policy_sampler` builds the sampler of
that.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from transformers.utils.logging import get_logger

from fastp3o.config import EnvironmentConfig, PolicyConfig
from fastp3o.errors import UserError
from fastp3o.models.merging import has_adapter, parted
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.quantized import quantized_layers
from fastp3o.models.sampling_copy import SamplingCopy
from fastp3o.rollouts.cache import available_memory, return_unused_memory
from fastp3o.rollouts.engine_sampler import EngineSampler, named_sampler
from fastp3o.rollouts.groups import (
    Ends,
    Group,
    Prompt,
    Sampler,
    SamplingSettings,
    sampling_settings,
)
from fastp3o.rollouts.turns.environment import load_environments
from fastp3o.rollouts.turns.kept import KeptTurns
from fastp3o.rollouts.turns.observation import chat_observations, plain_observations
from fastp3o.rollouts.turns.sampler import TrajectorySampler
from fastp3o.rollouts.turns.served import ServedTrajectories
from fastp3o.rollouts.vllm.publisher import Publisher
from fastp3o.rollouts.vllm.sampler import VLLMSampler
from fastp3o.runtime.context import Context
from fastp3o.runtime.precision import choose_precision
from fastp3o.runtime.processes import on_every_process

logger = get_logger(__name__)
# Bytes per parameter of a training policy with its reference and reward model: masters, moments,
# weights.
WHILE_TRAINING = 16

# --- what is sampled ------------------------------------------------------------------------------


@dataclass
class SampledModel:
    """A model to sample from. copy: sampled in its place, if it is spread over processes, if its
    weights are finer than its passes, or if it has adapters; None if it is sampled itself.
    optional: a copy that memory may have no room for. publisher: brings it to servers, which sample
    in place of both; None without.
    """

    model: PackedModel
    copy: SamplingCopy | None
    publisher: Publisher | None = None
    optional: bool = False

    @cached_property
    def has_room(self) -> bool:
        """Whether memory has room for the copy beside all that trains and rewards: asked at the
        first rollout.
        """
        assert self.copy is not None
        fits = not self.optional or self.copy.bytes < available_memory(self.copy.memory.device)
        if not fits:
            logger.warning(
                f"no room to merge adapters ({self.copy.bytes / 1e9:.1f} GB): rollouts are slower when they are not"
            )
        return fits

    def gathered(self, build: Callable[[PackedModel], Sampler]) -> Sampler:
        """A sampler of the copy, for which each process gathers the model's weights once a call.
        build: of a model.
        """
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
    """The policy, which is not on its device yet, and the copy or the servers that are sampled in
    its place, if there must be any. bytes_per_parameter: of all that is spread over the processes.
    publishing: arguments of a Publisher.
    """
    # Servers get whole models: adapters are merged into the weights that go there.
    if config.sampler == "vllm":
        if not policy.mergeable:
            raise UserError(
                "--sampler vllm gets merged adapters, and those of --lora_targets cannot be merged"
            )
        if has_adapter(policy.model) and parted(policy.model):
            tied = "--sampler vllm: servers have one matrix for embeddings and head"
            raise UserError(f"{tied}, and --lora_targets adapts one of these: name other layers")
        return SampledModel(policy, None, Publisher(context, config, policy, **publishing))
    # Quantized weights are sampled as they are, so that rollouts are the policy's own.
    if quantized_layers(policy):
        return SampledModel(policy, None)
    precision, mesh = context.precision, context.mesh
    on_gpu = context.device.type == "cuda"
    # A CPU gains nothing, and samples from the weights themselves.
    dtype = precision.autocast if on_gpu and precision.autocast else precision.weights
    # With adapters merged into its weights a GPU samples faster.
    merges = on_gpu and has_adapter(policy.model) and policy.mergeable
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    memory = available_memory(context.device)
    replicas = (
        mesh["replicas"].size()
        if mesh is not None and "replicas" in (mesh.mesh_dim_names or ())
        else 1
    )
    if mesh is None:
        # Next to weights in half precision a copy without adapters takes as much again.
        fits = parameters * (precision.weights.itemsize + dtype.itemsize) < memory
        if dtype == precision.weights and not (merges and fits):
            return SampledModel(policy, None)
    # Spread weights are gathered in each process for a round of rollouts, beside what stays spread.
    elif (
        bytes_per_parameter * parameters * replicas // mesh.size() + parameters * dtype.itemsize
        >= memory
    ):
        context.accelerator.print(
            "warning: rollouts need a whole policy in each process; --sampler vllm moves them to servers"
        )
    copy = SamplingCopy(policy, context.device, dtype, merges=merges)
    return SampledModel(policy, copy, optional=mesh is None and dtype == precision.weights)


def sampled_frozen(
    config: PolicyConfig, frozen: PackedModel, context: Context, *sizes: int
) -> SampledModel:
    """`sampled_model` of a policy that does not train, which may be in another precision than the
    run's.
    """
    if frozen.model.dtype != context.precision.weights:
        names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
        context = context._replace(precision=choose_precision(names[frozen.model.dtype], "fp32"))
    return sampled_model(config, frozen, context, *sizes)


# --- samplers of it -------------------------------------------------------------------------------


def sampled_here(config: PolicyConfig, frozen: PackedModel, context: Context) -> SampledModel:
    """The same in this process, also where servers sample the policy: they have its weights."""
    if config.sampler != "vllm":
        return sampled_frozen(config, frozen, context)
    return SampledModel(
        frozen,
        None if context.mesh is None else SamplingCopy(frozen, context.device, frozen.model.dtype),
    )


def policy_sampler(
    config: PolicyConfig,
    policy: SampledModel,
    context: Context,
    batch_size: int,
    *,
    greedy: bool = False,
) -> Sampler:
    """Builds the policy's sampler. batch_size: prompts at once in its own process. greedy: the most
    likely tokens.
    """
    settings = sampling_settings(config)
    settings = replace(settings, top_k=1) if greedy else settings
    if isinstance(config, EnvironmentConfig) and config.has_turns:
        return trajectory_sampler(config, config, policy, context, batch_size, settings)
    longest, tokenizer = config.max_response_tokens, context.tokenizer
    if policy.publisher is not None:
        return VLLMSampler(
            policy.publisher, tokenizer, max_response_tokens=longest, settings=settings
        )

    def single_turns(model: PackedModel) -> Sampler:
        return named_sampler(
            config, model, tokenizer, settings, max_response_tokens=longest, batch_size=batch_size
        )

    return policy.gathered(single_turns)


def trajectory_sampler(
    config: PolicyConfig,
    turns: EnvironmentConfig,
    policy: SampledModel,
    context: Context,
    batch_size: int,
    settings: SamplingSettings,
) -> Sampler:
    """Builds a sampler of responses of several turns, which the configuration's environment or
    tools answer.
    """
    tokenizer = context.tokenizer
    if policy.publisher is not None:
        tokenizer = deepcopy(tokenizer)  # threads that share one change its settings for each other
    ends = Ends(policy.model.model, tokenizer, settings.stops).ids
    role = turns.message_role
    variables = config.template_settings, context.clock
    observe = (
        chat_observations(tokenizer, role, ends, *variables)
        if role
        else plain_observations(tokenizer)
    )
    environments = load_environments(turns, tokenizer)
    limits = {"max_turns": turns.max_turns, "longest": config.max_response_tokens}
    if policy.publisher is not None:
        answers = VLLMSampler(
            policy.publisher,
            tokenizer,
            max_response_tokens=turns.max_turn_tokens,
            settings=settings,
        )
        return ServedTrajectories(answers, tokenizer, environments, observe, **limits)
    # First turns share their prompt among K responses; from then on each trajectory is a context of
    # its own.
    contexts = batch_size * turns.responses_per_prompt

    def trajectories(model: PackedModel) -> Sampler:
        build = partial(
            named_sampler,
            config,
            model,
            tokenizer,
            settings,
            max_response_tokens=turns.max_turn_tokens,
        )
        first_turns, later_turns = build(batch_size=batch_size), build(batch_size=contexts)
        options: dict[str, Any] = dict(limits)
        # The engine keeps keys and values from turn to turn; other samplers compute a trajectory
        # again each turn.
        if isinstance(first_turns, EngineSampler):
            kept = KeptTurns(first_turns, later_turns, config.max_response_tokens)
            first_turns, later_turns, options["end"] = kept, kept.go_on, kept.end
        sampler = TrajectorySampler(
            first_turns, later_turns, tokenizer, environments, observe, **options
        )
        # Processes need different numbers of turns: they meet at the end of a call alone, also
        # after an error.
        return lambda *call: on_every_process(context.accelerator, lambda: sampler(*call))

    return policy.gathered(trajectories)
