"""Chooses what trains: all, the top layers, or LoRA adapters with dropout."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from fastp3o.config import TrainableConfig
from fastp3o.errors import UserError
from fastp3o.models.mergeable import UnmergeableError, require_mergeable, sizes
from fastp3o.models.merging import ADAPTER
from fastp3o.models.packed_model import PackedModel


def choose_trainable(model: PackedModel, config: TrainableConfig) -> None:
    """Freezes everything except what the configuration selects. A reward model's head, which is
    zero at first, always trains.
    """
    if config.lora_rank:
        if config.lora_save == "adapter" and not model.model.name_or_path:
            raise UserError(
                "--lora_save adapter needs a model that is no adapter itself: no checkpoint holds its base"
            )
        add_lora(model, config)
    elif config.trainable_layers:
        freeze_below(model, config.trainable_layers)
    if scores_responses(model):
        cast(nn.Module, model.model.score).requires_grad_(True)


def scores_responses(model: PackedModel) -> bool:
    """Whether this is a reward model, which has a head `score`."""
    return hasattr(model.model, "score")


def freeze_below(model: PackedModel, layers: int) -> None:
    """Freezes all but the top `layers` of the body and the norm after them; the first author
    trained two.

    Embeddings and head are frozen, so that activations below and the gradient of the head are never
    made. Raises ValueError if the model has fewer layers.
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
    """Freezes the model and adds LoRA adapters (peft) to all linear layers except the head, or to
    `lora_targets`. Their inputs have dropout in passes within `dropout_on`. Raises ValueError if
    the head is named, whose adapter losses would not see, if peft is not installed, and if merged
    adapters would be another policy, unless only they are saved: nothing merges them then.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(f"--lora_rank needs peft ({error}): pip install '.[lora]'") from error
    targets, dropout = str(config.lora_targets), config.lora_dropout
    largest = max(
        min(weight.shape) for weight in model.model.base_model.parameters() if weight.dim() == 2
    )
    if config.lora_rank > largest:
        raise UserError(
            f"--lora_rank is {config.lora_rank}, and the model's matrices have a rank of {largest} at most"
        )
    # peft divides it by the rank, whatever number it is.
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=cast(int, config.lora_alpha),
        lora_dropout=dropout,
        use_rslora=config.use_rslora,
        target_modules=targets if targets == "all-linear" else targets.split(","),
        base_model_name_or_path=model.model.name_or_path,
        task_type="SEQ_CLS"
        if scores_responses(model)
        else "CAUSAL_LM",  # "all-linear" leaves its head
    )
    plain = sizes(model.model)
    try:
        with warnings.catch_warnings():
            # It looks for its own ranks of experts' weights among layers alone.
            warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys")
            # transformers' own methods do the same, but only with a peft of their choice: 5.24 came
            # out before that.
            inject_adapter_in_model(lora, model.model, ADAPTER)
        model.head()
    except ValueError as error:
        raise UserError(f"--lora_targets {targets}: {error}") from error
    for module in model.modules():
        dropouts = getattr(module, "lora_dropout", None)
        if dropout and isinstance(dropouts, nn.ModuleDict):
            dropouts.update({adapter: SwitchedDropout(dropout) for adapter in dropouts})
    try:
        require_mergeable(model, plain)
    except UnmergeableError as error:
        if config.lora_save != "adapter":
            remedy = "name other layers, or --lora_save adapter"
            raise UserError(f"--lora_targets {targets}: {error}; {remedy}") from error
        model.mergeable = False
    except UserError as error:
        raise UserError(f"--lora_targets {targets}: {error}; name other layers") from error


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within the block, the model computes as if it had no adapters."""
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
    """Dropout that is off outside of `dropout_on`, also in training mode: log-probs of evaluations,
    references, old policies and KTO's reference point come from the same model and must not be
    random. It draws from torch's global generator, which states hold.
    """

    on = False

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.p, training=self.on)


@contextmanager
def dropout_on(model: nn.Module) -> Iterator[None]:
    """Within the block, adapters apply dropout. Backward passes belong inside: they may recompute
    activations.
    """
    switched = [module for module in model.modules() if isinstance(module, SwitchedDropout)]
    for module in switched:
        module.on = True
    try:
        yield
    finally:
        for module in switched:
            module.on = False
