"""Loads policies and reward models from checkpoints: a folder or a hub name. Broken or incomplete
ones are refused.

Only the main process loads weights; the others have their models on the meta device, for `shard`.
"""

from contextlib import nullcontext, suppress
from math import isfinite
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from fastp3o.errors import UserError
from fastp3o.models.adapters import with_adapters
from fastp3o.models.checkpoint_files import (
    at,
    base_model_name,
    dtypes_of_floats,
    errors_naming,
    has_file,
    load_config,
    weight_files,
)
from fastp3o.models.load_report import listed, require_whole, without_report
from fastp3o.models.overflow import Overflow, OverflowsError
from fastp3o.models.packable import require_packable, require_trainable
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.preference import MARKER, begin_head, preference_dim
from fastp3o.models.quantized import checked, quantized_loading
from fastp3o.models.sharding import computed_in, is_main_process, number_of_processes
from fastp3o.sources import HubRef, InMemory, ModelSource

CPU = torch.device("cpu")
HALF = {"BF16": torch.bfloat16, "F16": torch.float16}
# Endings of settings that make passes in training mode random: dropout, and noise of the routers of
# experts.
NOISE = ("dropout", "pdrop", "dropout_prob", "layerdrop", "drop", "jitter_noise", "jitter_eps")


# --- policies and reward models -------------------------------------------------------------------


def load_policy(
    name: ModelSource,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    trains: bool = False,
    as_stored: bool = False,
    quantize: str | None = None,
) -> PackedModel:
    """Loads a causal LM without dropout or router noise: a policy's log-probabilities must not be
    random. LoRA adapters are merged into it. as_stored: for a model that `shard` spreads,
    half-precision weights of a checkpoint stay in its mapped file until then. quantize: bits of its
    linear layers, 4bit or 8bit.

    Raises ValueError if the checkpoint is incomplete, if the model cannot be run on packed rows,
    and if a model that trains still gives other log-probabilities in training mode.
    """
    base = base_model_name(name)
    quantized = quantized_options(name, base, quantize)
    if not is_main_process():
        model = without_weights(
            AutoModelForCausalLM, base, dtype=dtype, trust_remote_code=trust_remote_code
        )
        if isinstance(name, InMemory):
            name.value.copy_generation_config(model)
        else:
            with suppress(OSError):  # it has none of its own
                model.generation_config = GenerationConfig.from_pretrained(str(base), **at(base))
        if base != name:
            model = with_adapters(model, name)
        return PackedModel(named(model, name, base))
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, **quantized}
    model, loading = from_checkpoint(
        AutoModelForCausalLM, base, as_stored and base == name, **options
    )
    require_whole(base, loading)
    require_finite_weights(base, model)
    if base != name:
        model = with_adapters(model, name)
    checked(model)
    policy = PackedModel(named(model, name, base)).to(device)
    with computed_in(dtype, policy) if as_stored else nullcontext():
        require_packable(policy, name)
        return require_trainable(policy, name) if trains else policy


def quantized_options(name: ModelSource, base: ModelSource, quantize: str | None) -> dict[str, Any]:
    """The arguments that load a quantized model; none if `quantize` is None."""
    if quantize is not None and base != name:
        raise UserError(
            f"--quantize needs a whole model, and {name} is an adapter: pass the merged model"
        )
    return {} if quantize is None else quantized_loading(quantize)


def named(model: Any, name: ModelSource, base: ModelSource) -> Any:
    """Sets the model's name to that of the checkpoint that holds its weights, or to none if
    adapters were merged into it.
    """
    start = name.value.model.name_or_path if isinstance(name, InMemory) else str(base)
    model.name_or_path = start if base == name else ""
    model.revision_loaded = base.revision if base == name and isinstance(base, HubRef) else None
    return model


def load_reward_model(
    name: ModelSource,
    *,
    new_head: bool = False,
    vector_size: int = 0,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    as_stored: bool = False,
    quantize: str | None = None,
) -> PackedModel:
    """Loads a sequence classifier with one output. LoRA adapters are merged into it; its head may
    be saved with them.

    new_head: also take a causal LM's checkpoint, which gets a scalar head that starts at zero.
    vector_size: loads a preference model with vectors of this size in its place; its configuration
    says that it is one. as_stored and quantize: as for policies; the head is not quantized. Raises
    ValueError if the checkpoint is incomplete or its head untrained, if the model has no linear
    `score` head over hidden states, or other outputs, if a reward model is asked for and it is a
    preference model or the other way round, and if packed rows cannot run it.
    """
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    options["num_labels"] = vector_size or 1
    base = base_model_name(name)
    stored = stored_vector_size(name, trust_remote_code=trust_remote_code)
    require_same_kind(name, stored, vector_size)
    if not is_main_process():
        model = without_weights(AutoModelForSequenceClassification, base, **options)
        if base != name:
            model = with_adapters(model, name)
        return PackedModel(named(model, name, base))
    if quantized := quantized_options(name, base, quantize):
        quantized["quantization_config"].llm_int8_skip_modules = ["score"]
    options |= quantized
    model, loading = from_checkpoint(
        AutoModelForSequenceClassification, base, as_stored and base == name, **options
    )
    head = score_head(name, model)
    headless = "score.weight" in loading["missing_keys"]
    if not headless:
        require_outputs(name, head, loading, stored, vector_size)
    require_whole(
        base, loading, may_lack={"score.weight", "score.bias"}, may_exceed={"lm_head.weight"}
    )
    require_finite_weights(base, model)
    if headless:
        begin_head(head) if vector_size else nn.init.zeros_(head.weight)
    if vector_size:
        setattr(model.config, MARKER, vector_size)
    if base != name:
        model = with_adapters(model, name)
        head = model.score
    if not new_head:
        require_trained(name, head, headless=headless)
    checked(model)
    scorer = PackedModel(named(model, name, base).to(device))
    with computed_in(dtype, scorer) if as_stored else nullcontext():
        return require_packable(scorer, name)


def score_head(name: ModelSource, model: nn.Module) -> nn.Linear:
    """A classifier's head. Raises UserError if it has no linear one."""
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"{type(model).__name__} ({name}) has no linear head `score`; use a decoder-only reward model"
        )
    return head


def require_trained(name: ModelSource, head: nn.Linear, *, headless: bool) -> None:
    """Raises UserError for a head without weights, or of zeros. headless: whether the checkpoint
    has none.
    """
    if not head.weight.any():
        lack = "it has no head `score`" if headless else "its head `score` is zero"
        raise UserError(
            f"{name} is not a trained reward model: {lack}; train one from it with fastp3o reward"
        )


def require_outputs(
    name: ModelSource, head: nn.Linear, loading: dict[str, Any], stored: int, vector_size: int
) -> None:
    """Raises UserError if a checkpoint has a head of other outputs than are asked for. stored: of
    the vectors that the checkpoint says it has.
    """
    mismatched = (shape[0] for key, shape, _ in loading["mismatched_keys"] if key == "score.weight")
    outputs = next(mismatched, len(head.weight))
    if (outputs, stored) != (len(head.weight), vector_size):
        begins = "--preference_dim begins with a language model, or goes on with a preference model of its size"
        raise UserError(
            f"{name} has {outputs} outputs; {begins if vector_size else 'a reward model has one'}"
        )


def stored_vector_size(name: ModelSource, *, trust_remote_code: bool = False) -> int:
    """The size of a preference model's vectors, by its configuration; 0 for every other model.
    Raises ValueError if the configuration cannot be read.
    """
    with errors_naming(name):
        return preference_dim(load_config(name, trust_remote_code))


def require_same_kind(name: ModelSource, stored: int, expected: int) -> None:
    """Raises ValueError for a preference model of another size than expected, 0 for a model that
    gives scores.
    """
    if stored and stored != expected:
        needed = f"vectors of {expected} are" if expected else "a score is"
        remedy = f"--preference_dim {stored} trains it further, --reward takes it where responses are compared"
        raise UserError(
            f"{name} is a preference model with vectors of {stored}, and {needed} needed here: {remedy}"
        )


# --- weights, and models without them -------------------------------------------------------------


def from_checkpoint(
    model_class: Any, name: ModelSource, as_stored: bool, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Loads a model without dropout or router noise. Also returns transformers' lists of missing,
    unexpected and mismatched weights.
    """
    with errors_naming(name), without_report():
        off = noise_off(load_config(name, options["trust_remote_code"]).to_dict())
        if isinstance(name, InMemory):
            labels = {"num_labels": options.pop("num_labels")} if "num_labels" in options else {}
            return name.value.copied(model_class, name.value.config(**off, **labels), **options)
        if has_file(name, GENERATION_CONFIG_NAME):
            # Transformers ignores one that it cannot read.
            GenerationConfig.from_pretrained(str(name), **at(name))
        # First, since transformers would load other formats.
        stored = {dtype for file in weight_files(name) for dtype in dtypes_of_floats(file)}
        dtype = (
            HALF.get(stored.pop())
            if as_stored and len(stored) == 1 and number_of_processes() > 1
            else None
        )
        loaded = off | options | ({} if dtype is None else {"dtype": dtype})
        reported = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, loading = model_class.from_pretrained(str(name), **reported, **at(name), **loaded)
        built = (
            model
            if dtype is None
            else with_weights_of(model, without_weights(model_class, name, **options))
        )
        return built, loading


def without_weights(
    model_class: Any,
    name: ModelSource,
    dtype: torch.dtype,
    trust_remote_code: bool,
    **settings: int,
) -> Any:
    """Builds the model of `from_checkpoint` with parameters on the meta device."""
    with errors_naming(name):
        off = noise_off(load_config(name, trust_remote_code).to_dict())
        config = load_config(name, trust_remote_code, **settings, **off)
        with init_empty_weights(include_buffers=False):
            model = model_class.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
        model.tie_weights()  # which this has parted
        return model


def with_weights_of(loaded: Any, built: Any) -> Any:
    """Puts the weights of a loaded model, in their dtypes, into a model built in another dtype,
    which keeps the dtype of its buffers.
    """
    for place, module in loaded.named_modules():
        built.get_submodule(place)._parameters.update(module._parameters)
    saved = loaded.state_dict()
    for name, buffer in built.named_buffers():
        buffer.copy_(saved.get(name, buffer))
    if built.can_generate():
        built.generation_config = loaded.generation_config
    return built.eval()


def noise_off(config: dict[str, Any]) -> dict[str, Any]:
    """Settings that turn off all dropout and router noise. A nested configuration that has any is
    returned whole.
    """
    off: dict[str, Any] = {}
    for key, value in config.items():
        # PhiMoE's routers also take it as a threshold in evaluation, so without it this would be
        # another model.
        if (config.get("model_type"), key) == ("phimoe", "router_jitter_noise"):
            continue
        if isinstance(value, float) and key.endswith(NOISE):
            off[key] = 0.0
        elif isinstance(value, dict) and (inside := noise_off(value)):
            off[key] = value | inside
    return off


# --- weights that are not finite ------------------------------------------------------------------


def require_finite_weights(name: ModelSource, model: nn.Module) -> None:
    """Raises ValueError for weights that are NaN or infinite, including those that no token of a
    trial would use.
    """
    bad = [
        key
        for key, weight in model.named_parameters()
        if weight.is_floating_point()
        and not torch.linalg.vector_norm(weight.detach(), float("inf")).isfinite()
    ]
    if bad:
        dtype = next(model.parameters()).dtype
        stored = largest_stored(name, bad[0])
        if dtype == torch.float16 and stored is not None and isfinite(stored):
            raise OverflowsError(str(name), Overflow(f"the weight {bad[0]}", stored))
        raise UserError(
            f"the checkpoint {name} has weights that are NaN or infinite in {dtype}: {listed(bad)}"
        )


def largest_stored(name: ModelSource, key: str) -> float | None:
    """The largest absolute value of a weight as stored in the checkpoint; None if it has no weight
    of this name.
    """
    if isinstance(name, InMemory):
        weights = name.value.model.state_dict()
        return float(weights[key].float().abs().max()) if key in weights else None
    for file in weight_files(name):
        with safe_open(file, framework="pt") as weights:
            if key in weights.keys():  # noqa: SIM118
                return float(weights.get_tensor(key).float().abs().max())
    return None
