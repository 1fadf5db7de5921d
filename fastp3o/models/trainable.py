"""Chooses what trains (all, the top layers, or LoRA adapters with dropout), and merges adapters for saving."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastp3o.config import TrainableConfig
from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.quantized import dequantized, quantized_layers
from fastp3o.models.sharding import is_main_process, number_of_processes, whole

ADAPTER = "default"  # peft's name of the only one


def choose_trainable(model: PackedModel, config: TrainableConfig) -> None:
    """Freezes all but what the configuration names, or nothing. A reward model's head, zero at first, always trains."""
    if config.lora_rank:
        if config.lora_save == "adapter" and not model.model.name_or_path:
            raise UserError("--lora_save adapter needs a model that is no adapter itself: no checkpoint holds its base")
        add_lora(model, config)
    elif config.trainable_layers:
        freeze_below(model, config.trainable_layers)
    if scores_responses(model):
        cast(nn.Module, model.model.score).requires_grad_(True)


def scores_responses(model: PackedModel) -> bool:
    """Whether it is a reward model, which has a head `score`."""
    return hasattr(model.model, "score")


def freeze_below(model: PackedModel, layers: int) -> None:
    """Freezes all but the top `layers` of the body and the norm after them; the first author trained two.

    Embeddings and head are frozen, so that activations below and the gradient of the head are never made.
    Raises ValueError if the model has fewer layers.
    """
    body = model.model.base_model
    stack = model.layers()
    if layers > len(stack):
        raise UserError(f"--trainable_layers is {layers}, and the model has {len(stack)} layers")
    model.requires_grad_(False)
    for layer in stack[len(stack) - layers :]:
        layer.requires_grad_(True)
    inside_layers = set(stack.modules())
    for module in body.modules():
        if "Norm" in type(module).__name__ and module not in inside_layers:
            module.requires_grad_(True)


def add_lora(model: PackedModel, config: TrainableConfig) -> None:
    """Freezes the model and adds LoRA adapters (peft) to all linear layers except the head, or to `lora_targets`. Their
    inputs have dropout in passes within `dropout_on`. Raises ValueError if the head is named, whose adapter losses
    would not see, and if peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(f"--lora_rank needs peft ({error}): pip install '.[lora]'") from error
    targets, dropout = config.lora_targets, config.lora_dropout
    largest = max(min(weight.shape) for weight in model.model.base_model.parameters() if weight.dim() == 2)
    if config.lora_rank > largest:
        raise UserError(f"--lora_rank is {config.lora_rank}, and the model's matrices have a rank of {largest} at most")
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=cast(int, config.lora_alpha),  # peft divides it by the rank, whatever number it is
        lora_dropout=dropout,
        use_rslora=config.use_rslora,
        target_modules=targets if targets == "all-linear" else targets.split(","),
        base_model_name_or_path=model.model.name_or_path,
        task_type="SEQ_CLS" if scores_responses(model) else "CAUSAL_LM",  # "all-linear" leaves its head
    )
    try:
        # transformers' own methods do the same, but only with a peft of their choice: 5.24 came out before that.
        inject_adapter_in_model(lora, model.model, ADAPTER)
        model.head()
    except ValueError as error:
        raise UserError(f"--lora_targets {targets}: {error}") from error
    for module in model.modules():
        dropouts = getattr(module, "lora_dropout", None)
        if dropout and isinstance(dropouts, nn.ModuleDict):
            dropouts.update({adapter: SwitchedDropout(dropout) for adapter in dropouts})


def has_adapter(model: PreTrainedModel) -> bool:
    return hasattr(model, "peft_config")


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """In the block the model computes as without its adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for module in adapted:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in adapted:
            module.enable_adapters(True)


class SwitchedDropout(nn.Dropout):
    """Dropout that is off outside of `dropout_on`, also in training mode: log-probs of evaluations, references, old
    policies and KTO's reference point come from the same model and must not be random. It draws from torch's global
    generator, which states hold.
    """

    on = False

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.p, training=self.on)


@contextmanager
def dropout_on(model: nn.Module) -> Iterator[None]:
    """In the block adapters have dropout. Backward passes, which may compute activations again, belong into it."""
    switched = [module for module in model.modules() if isinstance(module, SwitchedDropout)]
    for module in switched:
        module.on = True
    try:
        yield
    finally:
        for module in switched:
            module.on = False


@torch.no_grad()
def whole_model(model: PreTrainedModel, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A model without adapters, and its weights, into which LoRA adapters are merged. The given model is unchanged.
    Several processes gather one weight after the other into the main process's memory; the others get empty ones.
    Merged weights are in fp32, in which transformers then loads all. dtype: of the other weights; None for their own.
    """
    weights: dict[str, Tensor] = {}
    for names, weight, merged in whole_weights(model, dtype):
        if merged:  # Together they would be a second model on the device.
            weight = weight.cpu()
        if number_of_processes() > 1:
            weight = weight.cpu() if is_main_process() else weight.new_empty(0)
        weights |= dict.fromkeys(names, weight)
    merged = has_adapter(model)
    if dtype in (None, model.dtype) and not merged:
        return model, weights
    # Saving writes the dtype into the configuration, and the given model goes on with its own.
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are no longer
    with torch.device("meta"):
        plain = cast(Any, type(model)(config)).to(torch.float32 if merged else dtype or model.dtype)
    if model.can_generate():
        plain.generation_config = model.generation_config
    return plain, weights


@torch.no_grad()
def whole_weights(model: PreTrainedModel, dtype: torch.dtype | None) -> Iterator[tuple[list[str], Tensor, bool]]:
    """The weights of `named_weights`, whole on all processes, which iterate together: the names of each; itself, in
    `dtype`; and whether an adapter is merged into it, which is then in fp32. Buffers, and all for None, keep theirs.
    """
    quantized = {id(layer.weight): layer for layer in quantized_layers(model).values()}
    for names, part, adapted in named_weights(model):
        layer = quantized.get(id(part))
        weight = whole(part.detach()) if layer is None else dequantized(layer)
        if isinstance(part, nn.Parameter):
            weight = weight.to(dtype or weight.dtype)
        if adapted:
            weight = weight.float() + lora_delta(model.get_submodule(adapted), dtype)
        yield names, weight, bool(adapted)


def named_weights(model: PreTrainedModel) -> list[tuple[list[str], Tensor, str]]:
    """Each weight of a model, or this process's part of it, without adapters: its names, of which tied weights have
    several; itself; and the module whose adapter is to be merged into it, "" for none.
    """
    weights: dict[tuple[int, str], tuple[list[str], Tensor, str]] = {}
    quantized = {f"{name}.{kind}" for name in quantized_layers(model) for kind in ("weight", "bias")}
    scales = tuple(f"{name}." for name in quantized_layers(model))
    for name, part in model.state_dict(keep_vars=True).items():
        if ".lora_" in name or (name.startswith(scales) and name not in quantized):
            continue
        owner, adapted, base_name = name.partition(".base_layer.")
        # Tied weights stay tied, unless one of them is adapted.
        key = id(part), owner if adapted else ""
        weights.setdefault(key, ([], part, owner if base_name == "weight" else ""))
        weights[key][0].append(name.replace(".base_layer.", "."))
    return list(weights.values())


def lora_delta(adapted: nn.Module, dtype: torch.dtype | None) -> Tensor:
    """The product that the adapter adds to the weight of its layer, in fp32: rounded to half precision, it or the sum
    would lose what is small next to the weight, and with it much of what was learned. dtype: of the passes, to which
    the adapter's own weights are rounded; None for theirs.
    """
    inside = {
        id(part): nn.Parameter(whole(part.detach()).to(dtype or part.dtype).float(), requires_grad=False)
        if name.startswith("lora_")
        else part
        for name, part in adapted.named_parameters()
    }
    precise: Any = copy.deepcopy(adapted, inside)
    return precise.get_delta_weight(ADAPTER)
