"""A model with LoRA adapters as it is without them: the same policy in plain weights, by the names
of the plain model.

Which weight an adapter changes, and what it adds to it, peft's layers say themselves. They may wrap
a layer, a parameter of it, such as the weights of all experts, and one another.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastp3o.models.quantized import dequantized, quantized_layers
from fastp3o.models.sharding import is_main_process, number_of_processes, whole

ADAPTER = "default"  # peft's name of the only one


class Weight(NamedTuple):
    """A parameter or saved buffer of the plain model. names: its names there, of which tied weights
    have several. part: itself, or what this process has of it. adapters: peft's layers that add to
    it.
    """

    names: list[str]
    part: Tensor
    adapters: tuple[Any, ...]


def has_adapter(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def wraps(module: nn.Module) -> bool:
    """Whether the module is a peft layer around another module."""
    return "base_layer" in module._modules and hasattr(module, "get_delta_weight")


def adapted_parameter(layer: Any) -> str:
    """The name of the parameter of the inner module to which peft's layer adds."""
    return getattr(layer, "parameter_name", "weight")


def plain_modules(module: Any, place: str = "") -> Iterator[tuple[str, nn.Module, list[Any]]]:
    """The modules of a model without adapters, from the outermost inward: each with its place in
    the plain model and peft's layers around it, the outermost first. A module that the model uses
    twice is listed twice.
    """
    adapters = []
    while wraps(module):
        adapters.append(module)
        module = module.base_layer
    yield place, module, adapters
    for name, child in module._modules.items():
        if child is not None:
            yield from plain_modules(child, f"{place}.{name}" if place else name)


def named_weights(model: nn.Module) -> list[Weight]:
    """The weights of a model without adapters; of quantized layers, those that they stand for. Tied
    weights stay tied, unless an adapter changes one of them.
    """
    weights: dict[tuple[int, ...], Weight] = {}
    for place, module, layers in plain_modules(model):
        unsaved = module._non_persistent_buffers_set
        buffers = {name: buffer for name, buffer in module._buffers.items() if name not in unsaved}
        for name, part in {**module._parameters, **buffers}.items():
            if part is not None:
                adapters = tuple(layer for layer in layers if adapted_parameter(layer) == name)
                key = (id(part), *map(id, adapters))
                weight = weights.setdefault(key, Weight([], part, adapters))
                weight.names.append(f"{place}.{name}" if place else name)
    return list(weights.values())


@torch.no_grad()
def whole_weights(
    model: PreTrainedModel, dtype: torch.dtype | None
) -> Iterator[tuple[list[str], Tensor, bool]]:
    """Yields the weights of `named_weights`, gathered on all processes, which must iterate
    together: the names of each, the weight in `dtype`, and whether an adapter was merged into it;
    merged weights are in fp32. Buffers keep their dtype; with dtype None everything does.
    """
    quantized = {id(layer.weight): layer for layer in quantized_layers(model).values()}
    for names, part, adapters in named_weights(model):
        layer = quantized.get(id(part))
        weight = whole(part.detach()) if layer is None else dequantized(layer)
        if isinstance(part, nn.Parameter):
            weight = weight.to(dtype or weight.dtype)
        yield names, merged(weight, adapters, dtype) if adapters else weight, bool(adapters)


def merged(weight: Tensor, adapters: tuple[Any, ...], dtype: torch.dtype | None) -> Tensor:
    """A whole weight and what adapters add to it, in fp32. dtype: as `lora_delta` takes it."""
    weight = weight.float()
    for adapter in adapters:
        weight = lora_delta(adapter, dtype).to(weight.device).add_(weight)
    return weight


def lora_delta(adapted: nn.Module, dtype: torch.dtype | None) -> Tensor:
    """What an adapter adds to the weight of its layer, in fp32: rounded to half precision, it or
    the sum would lose what is small next to the weight, and with it much of what was learned.
    dtype: of the passes, to which the adapter's own weights are rounded; None for theirs.
    """
    base, name = inner(adapted), adapted_parameter(adapted)
    weight = getattr(base, name)
    # Of the weight within, peft reads the dtype and the size alone.
    stand_in = nn.Module()
    stand_in.register_parameter(
        name, frozen(torch.empty((), device=weight.device).expand(weight.shape))
    )
    inside: dict[int, Any] = {id(cast(Any, adapted).base_layer): stand_in}
    for own, part in adapted.named_parameters():
        if not own.startswith("base_layer."):
            inside[id(part)] = frozen(whole(part.detach()).to(dtype or part.dtype).float())
    precise: Any = copy.deepcopy(adapted, inside)
    return precise.get_delta_weight(ADAPTER)


def frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def plain_copy(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], copies: dict[int, Any] | None = None
) -> Any:
    """A copy of a model without adapters. parameters: those of the copy, by name; tied ones under
    one of their names. copies: replacements of parts of the model, by id.
    """
    copies = {} if copies is None else copies
    weights = [weight for weight in named_weights(model) if weight.names[0] in parameters]
    for names, part, _ in weights:
        copies[id(part)] = parameters[names[0]]
    # What is inside comes first.
    for _, module, adapters in reversed(list(plain_modules(model))):
        if adapters:
            copies[id(adapters[0])] = copy.deepcopy(module, copies)
    plain: Any = copy.deepcopy(model, copies)
    for names, _, _ in weights:
        for name in names:  # a weight that was tied may be two by now
            place, _, own = name.rpartition(".")
            plain.get_submodule(place)._parameters[own] = parameters[names[0]]
    return plain


@torch.no_grad()
def whole_model(
    model: PreTrainedModel, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A model without adapters, and its weights, into which LoRA adapters are merged. The given
    model is unchanged. Several processes gather one weight after the other into the main process's
    memory; the others get empty ones. Merged weights are in fp32, in which transformers then loads
    all. dtype: of the other weights; None for their own.
    """
    weights: dict[str, Tensor] = {}
    for names, weight, adapted in whole_weights(model, dtype):
        if adapted:  # Together they would be a second model on the device.
            weight = weight.cpu()
        if number_of_processes() > 1:
            weight = weight.cpu() if is_main_process() else weight.new_empty(0)
        weights |= dict.fromkeys(names, weight)
    if dtype in (None, model.dtype) and not has_adapter(model) and not parted(model):
        return model, weights
    return described(model, torch.float32 if has_adapter(model) else dtype or model.dtype), weights


def described(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model without adapters, on the meta device, with the configuration that readers of its
    weights need.
    """
    # Saving writes the dtype into the configuration, and the given model goes on with its own.
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are no longer
    if parted(model):
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False
    with torch.device("meta"):
        plain = cast(Any, type(model)(config)).to(dtype)
    if model.can_generate():
        plain.generation_config = model.generation_config
    return plain


def parted(model: PreTrainedModel) -> bool:
    """Whether head and embeddings are separate weights without adapters, although the configuration
    ties them.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return False
    return wraps(head) or wraps(embeddings) or inner(head).weight is not inner(embeddings).weight


def inner(module: Any) -> Any:
    """The module inside peft's layers."""
    while wraps(module):
        module = module.base_layer
    return module
