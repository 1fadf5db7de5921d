"""Losses within a model's own forward call, where wrappers see them: DDP reduces, FSDP gathers, autocast holds."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastp3o_kernels.head.head import Head
from fastp3o_kernels.model_head import check_trial, head_of, output_layer
from fastp3o_kernels.operation import uncompiled

Model = TypeVar("Model", bound=nn.Module)

NOT_REDUCED = (
    "model(..., of_hidden=...) is called with several processes and outside of DDP and FSDP: nobody adds up their "
    "gradients. Call the wrapper, ddp(..., of_hidden=...), not ddp.module. Who reduces them elsewhere may ignore this"
)


def expose_head(model: Model) -> Model:
    """Afterwards model(..., of_hidden=function) returns function(hidden, head): the body's last hidden states, and the
    `Head` that would make logits of them. Everything else stays.

        expose_head(model)
        model = DDP(model)  # or fully_shard(model), accelerator.prepare(model), peft's get_peft_model(model, ...)
        loss = model(input_ids=ids, attention_mask=mask, of_hidden=lambda hidden, head: linear_p3o_loss(
            hidden.flatten(0, 1)[tokens.predicted_at], head, tokens.labels, tokens.cu_seqlens, ...).loss)

    The function must not keep hidden states or head: outside of the call their weights may be gone. With FSDP2
    (`fully_shard`) the head may be in the root's group or in one of its own. A call that goes past the wrapper, such as
    ddp.module(...), would leave each process with its own gradients: it warns.

    model: a causal LM of transformers, or a peft model of one, before it is wrapped or prepared.

    Raises ValueError where it is wrapped already. At the call: for a head that is not a plain linear layer (an adapter
    on it, a quantised one), and at the first for a model that makes its logits otherwise, which a trial on a few tokens
    shows; losses raise it for a weight that is spread over processes and not gathered.
    """
    outer: Any = model
    inner: Any = outer.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(inner, "base_model") or not hasattr(inner, "get_output_embeddings"):
        raise ValueError(
            f"expose_head takes a causal LM of transformers, before it is wrapped, and got a {type(model).__name__}"
        )
    if hasattr(inner, "_forward_to_logits"):
        # What others have put around it since keeps it within.
        return model
    if hasattr(inner, "_original_forward"):
        raise ValueError("accelerate has prepared the model: call expose_head before accelerator.prepare")
    # Bound methods, which a deep copy of the model binds to the copy; a closure would compute with this one's weights.
    inner._forward_to_logits = inner.forward
    # A reward model makes no logits of all tokens that could be compared.
    inner._head_was_tried = hasattr(inner, "score")
    inner.forward = MethodType(with_of_hidden(inner.forward), inner)
    return model


def with_of_hidden(whole: Callable[..., Any]) -> Callable[..., Any]:
    """A forward method with `of_hidden`, and with the signature of the whole one, which `generate` reads."""

    @wraps(getattr(whole, "__func__", whole))
    def forward(
        model: Any, *arguments: Any, of_hidden: Callable[[Tensor, Head], Any] | None = None, **options: Any
    ) -> Any:
        if of_hidden is None:
            return model._forward_to_logits(*arguments, **options)
        if torch.is_grad_enabled() and nobody_reduces(model):
            warnings.warn(NOT_REDUCED, stacklevel=2)
        return called(of_hidden, model.base_model(*arguments, **options).last_hidden_state, model)

    return forward


def nobody_reduces(model: nn.Module) -> bool:
    """Whether there are several processes, and neither DDP nor FSDP sees this call."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        return False
    # FSDP makes a class of its own of each class that it wraps.
    return not any(type(module).__name__.startswith("FSDP") for module in model.modules())


@uncompiled
def called(of_hidden: Callable[[Tensor, Head], Any], hidden: Tensor, model: Any) -> Any:
    if not model._head_was_tried:
        # Not when it was exposed: many models cannot run before they are on their device.
        check_trial(model, replace(head_of(model), bias=None), hidden.device)
        model._head_was_tried = True
    gather = getattr(output_layer(model), "unshard", None)  # the head is an FSDP group of its own
    if gather is not None:
        gather()
    return of_hidden(hidden, head_of(model))
