"""Loads what a stage's configuration names: the model that trains, and its reference."""

from collections.abc import Callable

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
from fastp3o.training.row_length import fit_rows
from fastp3o.training.setup import holding

# --- the model that trains ------------------------------------------------------------------------


def load_trained(
    context: Context, config: StageConfig, load: Callable[..., PackedModel]
) -> tuple[PackedModel, Context]:
    """The model that trains, whose settings say how its responses end, and its context (`holding`),
    whose tokenizer gets another token for padding where a reward model needs one. load:
    `load_policy` or `load_reward_model`.
    """
    as_stored = not config.lora_rank  # adapters get the dtype of the weights that are there
    options = {
        "trust_remote_code": config.trust_remote_code,
        "quantize": config.quantize,
        "as_stored": as_stored,
    }
    model = load(config.model_source, **options).train()
    context = holding(context, config, model)
    ends = checkpoint_ends(
        config.model_source, context.tokenizer, trust_remote_code=config.trust_remote_code
    )
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


# --- the reference --------------------------------------------------------------------------------


def load_reference(
    context: Context, config: OnlineConfig, policy: PackedModel
) -> tuple[Reference, SampledModel | None]:
    """Loads the loop's reference, which may move, if it needs one; and the same model to sample
    from, if a mixture or an anchor of comparisons is sampled.
    """
    if not config.needs_reference:
        return NoReference(), None
    # A fixed reference costs least: with LoRA it is the policy without its adapters.
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
    if config.lora_rank and not config.reference:
        return WithoutAdapters(policy)
    return SecondModel(
        load_reference_model(context, config), context.device, context.mesh, offload=config.offload
    )


def load_reference_model(context: Context, config: OnlineConfig | PreferenceConfig) -> PackedModel:
    """The model that the policy's KL is measured against, before it is spread over the processes."""
    if config.reference:
        remote = config.trust_remote_code
        require_same_vocabulary(
            config.reference, config.model_source, context.tokenizer, trust_remote_code=remote
        )
    frozen = load_frozen_policy(context, config, config.reference or config.model_source)
    if config.compile_layers:
        frozen.compile_layers()
    return frozen
