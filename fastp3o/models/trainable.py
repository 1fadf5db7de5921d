"""Which parameters of a policy train: all, the top layers, or LoRA adapters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastp3o.config import TrainableConfig
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import whole


def choose_trainable(model: PackedModel, config: TrainableConfig) -> None:
    """Leaves to train what the configuration names, and everything where it names nothing; a reward model's head, which
    begins at zero, trains in any case.
    """
    if config.lora_rank:
        add_lora(model, rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets)
    elif config.trainable_layers:
        freeze_below(model, config.trainable_layers)
    if scores_responses(model):
        cast(nn.Module, model.model.score).requires_grad_(True)


def scores_responses(model: PackedModel) -> bool:
    """Whether it is a reward model, which has a head `score`."""
    return hasattr(model.model, "score")


def freeze_below(model: PackedModel, layers: int) -> None:
    """Leaves only the top `layers` of the body and the norm behind them to train, as the first author did with two.

    Embeddings and head are frozen, so that activations below and the gradient of the head are never made (but for a
    reward model's head, see `choose_trainable`).
    Raises ValueError where the model has fewer layers.
    """
    body = model.model.base_model
    stack = model.layers()
    if layers > len(stack):
        raise ValueError(f"--trainable_layers is {layers}, and the model has {len(stack)} layers")
    model.requires_grad_(False)
    for layer in stack[len(stack) - layers :]:
        layer.requires_grad_(True)
    inside_layers = set(stack.modules())
    for module in body.modules():
        if "Norm" in type(module).__name__ and module not in inside_layers:
            module.requires_grad_(True)


def add_lora(model: PackedModel, *, rank: int, alpha: float, targets: str) -> None:
    """Freezes the model and adds LoRA adapters without dropout (peft), to all linear layers but the head or to those
    named, separated by commas.

    Raises ValueError where the head is among them, which the losses would not see, and where peft is not installed.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError("--lora_rank needs peft: pip install 'fastp3o[lora]'") from error
    largest = max(min(weight.shape) for weight in model.model.base_model.parameters() if weight.dim() == 2)
    if rank > largest:
        raise ValueError(f"--lora_rank is {rank}, and the model's matrices have a rank of {largest} at most")
    lora = LoraConfig(
        r=rank,
        lora_alpha=cast(int, alpha),  # peft divides it by the rank, whatever number it is
        target_modules=targets if targets == "all-linear" else targets.split(","),
        base_model_name_or_path=model.model.name_or_path,
        task_type="SEQ_CLS" if scores_responses(model) else "CAUSAL_LM",  # "all-linear" leaves its head
    )
    try:
        model.model.add_adapter(lora)
    except ValueError as error:
        raise ValueError(f"--lora_targets {targets}: {error}") from error
    model.head()


@contextmanager
def adapters_off(model: PackedModel) -> Iterator[None]:
    """The policy without its LoRA adapters: what it started from."""
    model.model.disable_adapters()
    try:
        yield
    finally:
        model.model.enable_adapters()


def as_it_is(weight: Tensor) -> Tensor:
    return weight


@torch.no_grad()
def whole_model(
    model: PreTrainedModel, dtype: torch.dtype | None = None, *, keep: Callable[[Tensor], Tensor] = as_it_is
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A model without adapters and its weights, into which LoRA adapters are merged; the model given stays as it is.

    A sharded model's weights are gathered one after the other, on all processes. dtype: of what is returned; None for
    the weights' own. keep: where each weight is kept while the others are gathered.
    """
    weights: dict[str, Tensor] = {}
    kept: dict[tuple[int, str], Tensor] = {}  # weights that are tied stay so, unless one of them is adapted
    for name, part in model.state_dict(keep_vars=True).items():
        if ".lora_" in name:
            continue
        owner, adapted, of_base = name.partition(".base_layer.")
        key = id(part), owner if adapted else ""
        if key not in kept:
            weight = whole(part.detach())
            own_dtype = weight.dtype if dtype is None or not isinstance(part, nn.Parameter) else dtype
            if of_base == "weight":
                adapter = cast(Any, model.get_submodule(owner))
                delta = whole(adapter.get_delta_weight(model.active_adapters()[0]))
                weight = weight.float() + delta.float()
            kept[key] = keep(weight.to(own_dtype))
        weights[name.replace(".base_layer.", ".")] = kept[key]
    if dtype in (None, model.dtype) and not getattr(model, "_hf_peft_config_loaded", False):
        return model, weights
    with torch.device("meta"):
        plain = cast(Any, type(model)(model.config)).to(dtype or model.dtype)
    if model.can_generate():
        plain.generation_config = model.generation_config
    return plain, weights
