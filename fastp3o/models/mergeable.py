"""Refuses adapters if merging them into the weights would give another policy than the one that
trains.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from fastp3o.errors import UserError
from fastp3o.models.load_report import missing, without_report
from fastp3o.models.merging import (
    ADAPTER,
    described,
    frozen,
    merged,
    named_weights,
    plain_copy,
    plain_modules,
)
from fastp3o.models.packable import logprob_tolerance, on_trial
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.models.quantized import dequantized, quantized_layers
from fastp3o.packing.packed_row import PackedRow

EFFECT = 0.3  # of a trial's adapters on a layer's results, next to inputs of size 1


class UnmergeableError(UserError):
    """The adapters can train, but their merged weights would be another policy."""


def sizes(model: nn.Module) -> dict[str, torch.Size]:
    """The sizes of the weights of a model without adapters, by name."""
    layers: dict[int, Any] = {id(layer.weight): layer for layer in quantized_layers(model).values()}
    by_name: dict[str, torch.Size] = {}
    for names, part, _ in named_weights(model):
        layer = layers.get(id(part))
        size = part.shape if layer is None else torch.Size([layer.out_features, layer.in_features])
        by_name |= dict.fromkeys(names, size)
    return by_name


def require_mergeable(model: PackedModel, plain: Mapping[str, torch.Size]) -> None:
    """Raises UnmergeableError unless the weights with adapters merged are those of the plain model,
    by name and size, each trained tensor is in one of them, transformers finds them all, and a
    trial with adapters that are not zero gives the same log-probs from both. The trial holds one
    layer's merged weights at a time, leaves adapters and random generators as they were, and is
    left out on the meta device. Raises UserError if the model cannot run with its adapters. plain:
    the sizes of the weights without them.
    """
    own = model.model
    if changed := sizes(own).items() ^ plain.items():
        raise UnmergeableError(f"merging would add, remove or resize the weight {min(changed)[0]}")
    adapters = [adapter for weight in named_weights(own) for adapter in weight.adapters]
    used = [id(part) for adapter in adapters for part in own_parameters(adapter)]
    trained = {id(part): name for name, part in own.named_parameters() if part.requires_grad}
    if unused := sorted(name for part, name in trained.items() if used.count(part) != 1):
        raise UnmergeableError(f"{unused[0]} cannot be merged into a weight")
    require_readable(own, plain)
    if any(part.is_meta for part in own.parameters()):
        return
    tolerance = logprob_tolerance(model, own.dtype)
    try:
        off = distance(model, adapters)
    except Exception as error:  # from anywhere in a model whose layers peft takes for others
        raise UserError(f"a trial failed with: {error}") from error
    if not off <= tolerance:
        kinds: dict[str, list[Any]] = {}
        for place, _, layers in plain_modules(own):
            kinds.setdefault(place.rpartition(".")[2], []).extend(layers)
        bad = [
            kind
            for kind, layers in kinds.items()
            if layers and not distance(model, layers) <= tolerance
        ]
        those = f"adapters of {', '.join(bad)}" if bad else "adapters"
        raise UnmergeableError(
            f"merged into the weights, {those} give other results (off by {off:.2g} on average)"
        )


def own_parameters(adapter: nn.Module) -> list[nn.Parameter]:
    """The parameters of a peft layer, without those of the module that it wraps."""
    return [part for name, part in adapter.named_parameters() if not name.startswith("base_layer.")]


def require_readable(model: PreTrainedModel, plain: Mapping[str, torch.Size]) -> None:
    """Raises UnmergeableError if transformers would initialize or ignore weights when it reads the
    saved names. Takes no memory: everything is on the meta device.
    """
    reader: Any = described(model, model.dtype)
    written = {
        name: torch.empty(size, dtype=model.dtype, device="meta") for name, size in plain.items()
    }
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        with without_report():
            _, loading = type(reader).from_pretrained(
                None,
                config=reader.config,
                state_dict=revert_weight_conversion(reader, written),
                device_map={"": "meta"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    finally:
        if shown:
            enable_progress_bar()
    if reason := missing(loading):
        raise UnmergeableError(
            f"transformers would not read the merged weights as they are written: it {reason}"
        )


def distance(model: PackedModel, adapters: list[Any]) -> float:
    """The mean difference of `results` with some of a model's adapters and with these merged, all
    others being zero. In training mode models may read the weight of a layer without its adapter:
    if it gives other results, its difference.
    """
    with enlarged(adapters), on_trial(model) as (_, row):
        expected = results(model, row)
        torch.manual_seed(0)  # of experts chosen at random, the same ones
        training = results(model.train(), row)
        if (training - expected).abs().mean() <= logprob_tolerance(model, model.model.dtype):
            model.eval()
        else:
            expected = training
            torch.manual_seed(0)
        return (results(merged_in_turn(model), row) - expected).abs().mean().item()


@contextmanager
def enlarged(adapters: list[Any]) -> Iterator[None]:
    """Within the block, adapter weights that are zero are random numbers, so that each adapter
    changes its layer's output.
    """
    parts = [(part, adapter) for adapter in adapters for part in own_parameters(adapter)]
    before = [part.detach().clone() for part, _ in parts]
    generator = torch.Generator().manual_seed(0)
    try:
        for part, adapter in parts:
            if not part.any():
                size = EFFECT / adapter.scaling[ADAPTER] / sqrt(adapter.r[ADAPTER])
                part.data.copy_(size * torch.randn(part.shape, generator=generator))
        yield
    finally:
        for (part, _), values in zip(parts, before, strict=True):
            part.data.copy_(values)


def results(model: PackedModel, row: PackedRow) -> Tensor:
    """Log-probs. Of a reward model, whose new head is zero, the head's inputs, next to their mean
    size.
    """
    if not hasattr(model.model, "score"):
        return labeled_logprobs(model, row)
    hidden: Tensor = model(row, row.ends_at, lambda hidden, _: hidden.float())
    return hidden / hidden.detach().square().mean().sqrt()


def merged_in_turn(model: PackedModel) -> PackedModel:
    """The model with its adapters merged, as it is sampled and saved. Each layer has merged weights
    only while it computes; everything else is shared with the model.
    """
    layers: dict[int, Any] = {}
    try:
        stack = list(model.layers())
    except UserError:  # then all at once
        stack = []
    for layer in stack:
        shell = copy.copy(layer)

        def forward(*args: Any, of: nn.Module = layer, **options: Any) -> Any:
            return merged_copy(of).forward(*args, **options)

        vars(shell)["forward"] = forward
        layers[id(layer)] = shell
    return merged_copy(model, layers)


@torch.no_grad()
def merged_copy(model: nn.Module, copies: dict[int, Any] | None = None) -> Any:
    """`plain_copy` that shares what has no adapter. copies: what takes the place of modules, by
    their ids.
    """
    copies = {} if copies is None else copies
    replaced = {
        id(part)
        for module in model.modules()
        if id(module) in copies
        for part in module.parameters()
    }
    quantized: dict[int, Any] = {
        id(layer.weight): layer for layer in quantized_layers(model).values()
    }
    for module in model.modules():
        shared = [
            *module.parameters(recurse=False),
            *module.buffers(recurse=False),
            getattr(module, "config", None),
        ]
        copies |= {id(part): part for part in shared}
    for layer in quantized.values():
        copies[id(layer)] = layer
    parameters = {}
    for names, part, adapters in named_weights(model):
        if not isinstance(part, nn.Parameter) or id(part) in replaced:
            continue
        if adapters:
            layer = quantized.get(id(part))
            dtype = own_parameters(adapters[0])[0].dtype
            weight = part.detach() if layer is None else dequantized(layer)
            part = frozen(merged(weight, adapters, None).to(dtype))
            if layer is not None:
                copies[id(layer)] = as_linear(layer)
        parameters[names[0]] = part
    return plain_copy(model, parameters, copies)


def as_linear(quantized: Any) -> nn.Linear:
    """A linear layer of the same size and with the same bias, without a weight."""
    linear = nn.Linear(quantized.in_features, quantized.out_features, bias=False, device="meta")
    linear.bias = quantized.bias
    return linear
