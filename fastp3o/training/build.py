"""Loads what a stage's configuration names: the model that trains, and its reference."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fastp3o.config import SamplerConfig, StageConfig
from fastp3o.data.tokens import Continuation, tokenize
from fastp3o.models.ends import checkpoint_ends, write_ends
from fastp3o.models.frozen import load_frozen_policy
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import (
    InContext,
    MovingReference,
    NoReference,
    Reference,
    SecondModel,
    WithoutAdapters,
)
from fastp3o.models.tokenizer import require_same_vocabulary
from fastp3o.models.trainable import choose_trainable
from fastp3o.objectives.config.base import OnlineConfig
from fastp3o.objectives.config.distillation import DistillationConfig
from fastp3o.objectives.config.preferences import PreferenceConfig
from fastp3o.rollouts.plan import SampledModel, sampled_here
from fastp3o.runtime.context import Context
from fastp3o.training.row_length import fitting, further_bytes
from fastp3o.training.setup import holding

StageT = TypeVar("StageT", bound=StageConfig)

# --- the model that trains ------------------------------------------------------------------------


def load_trained(
    context: Context, config: StageT, load: Callable[..., PackedModel]
) -> tuple[PackedModel, Context, StageT]:
    """The model that trains, and what it changes of the run: the context that holds it (`holding`),
    and the configuration with rows that memory holds beside it (`fitting`).

    load: `load_policy` or `load_reward_model`, which may give the tokenizer another token for
    padding.
    """
    model = load(
        config.model_source,
        trust_remote_code=config.trust_remote_code,
        quantize=config.quantize,
        as_stored=not config.lora_rank,  # adapters get the dtype of the weights that are there
    ).train()
    # fp16 may overflow in this model. That is tried while the model is whole and in fp32.
    context = holding(context, config, model)
    # What is saved says how responses end and how they are sampled, so that others generate as this
    # run has trained.
    ends = checkpoint_ends(
        config.model_source, context.tokenizer, trust_remote_code=config.trust_remote_code
    )
    write_ends(model.model, context.tokenizer, ends)
    if isinstance(config, SamplerConfig):
        model.temperature = config.temperature
        model.model.generation_config.update(
            do_sample=True,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p or None,
            repetition_penalty=None,
        )
    # A model that cannot hold the longest sequence is refused before anything is computed.
    model.check_reach(config.longest_sequence)
    choose_trainable(model, config)
    # Adapters are there by now, so that layers are recomputed and compiled with them.
    if config.gradient_checkpointing:
        model.recompute_activations()
    if config.compile_layers:
        model.compile_layers()
    # A CPU's memory holds less than a GPU's beside what else runs there, so rows are shorter where
    # their length is not set.
    if config.tokens_per_row is None and context.device.type == "cpu":
        bytes_of = partial(
            further_bytes,
            context,
            model,
            trainable_layers=config.trainable_layers,
            optimizer=config.optimizer,
            checkpointing=config.gradient_checkpointing,
            second_model=config.needs_reference and not config.lora_rank,
        )
        config = config.with_packing(fitting(context, config.packing, bytes_of))
    return model, context, config


# --- the reference --------------------------------------------------------------------------------


def load_reference(
    context: Context, config: OnlineConfig, policy: PackedModel
) -> tuple[Reference, SampledModel | None]:
    """Loads the loop's reference, which may move, if it needs one; and the same model to sample
    from, if a mixture or an anchor of comparisons is sampled.
    """
    if not config.needs_reference:
        return NoReference(), None
    # A reference that neither moves nor is sampled costs least.
    if not config.samples_reference and not config.reference_moves:
        return load_fixed_reference(context, config, policy), None
    # One that is sampled, or moves, has weights of its own.
    frozen = load_reference_model(context, config)
    sampled = sampled_here(config, frozen, context) if config.samples_reference else None
    second = SecondModel(frozen, context.device, context.mesh, offload=config.offload)
    if config.reference_moves:
        return MovingReference(
            second, every=config.reference_every, decay=config.reference_decay
        ), sampled
    return second, sampled


def in_context(context: Context, config: OnlineConfig, reference: Reference) -> Reference:
    """The reference as it sees --teacher_context. Raises ValueError if its positions end too soon
    for that.
    """
    if not isinstance(config, DistillationConfig) or not config.teacher_context:
        return reference
    # The teacher reads the context in addition to the policy's longest sequence.
    (ids,) = tokenize(context.tokenizer, [config.teacher_context], control=True)
    reference.model.check_reach(config.longest_sequence, context=len(ids))
    moved = Continuation(context.tokenizer).moved
    return InContext(reference, ids, context.tokenizer.bos_token_id, config.packing, moved)


def load_fixed_reference(
    context: Context, config: OnlineConfig | PreferenceConfig, policy: PackedModel
) -> Reference:
    """The policy as it was when training began: a second model, or a LoRA policy without its
    adapters.
    """
    # With LoRA the base weights do not move: without its adapters the policy is the reference, and
    # nothing else must be in memory.
    if config.lora_rank and not config.reference:
        return WithoutAdapters(policy)
    return SecondModel(
        load_reference_model(context, config), context.device, context.mesh, offload=config.offload
    )


def load_reference_model(context: Context, config: OnlineConfig | PreferenceConfig) -> PackedModel:
    """The model that the policy's KL is measured against, before it is spread over the processes."""
    # Log-probs are compared token by token, so another model must have the same tokens.
    if config.reference:
        remote = config.trust_remote_code
        require_same_vocabulary(
            config.reference, config.model_source, context.tokenizer, trust_remote_code=remote
        )
    frozen = load_frozen_policy(context, config, config.reference or config.model_source)
    if config.compile_layers:
        frozen.compile_layers()
    return frozen
