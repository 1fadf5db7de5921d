"""Losses within a model's own forward call, where wrappers see them: DDP reduces, FSDP gathers, autocast holds."""

import warnings
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastp3o_kernels.head.head import Head
from fastp3o_kernels.uncompiled import uncompiled

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
    on it, a quantised one); losses raise it for a weight that is spread over processes and not gathered.
    """
    outer: Any = model
    inner: Any = outer.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(inner, "base_model") or not hasattr(inner, "get_output_embeddings"):
        raise ValueError(
            f"expose_head takes a causal LM of transformers, before it is wrapped, and got a {type(model).__name__}"
        )
    if hasattr(inner, "_original_forward"):
        raise ValueError("accelerate has prepared the model: call expose_head before accelerator.prepare")
    # Bound methods, which a deep copy of the model binds to the copy; a closure would compute with this one's weights.
    inner._forward_to_logits = inner.forward
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
        hidden = model.base_model(*arguments, **options).last_hidden_state
        gather = getattr(output_layer(model), "unshard", None)  # the head is an FSDP group of its own
        if gather is not None:
            gather()
        return called(of_hidden, hidden, head_of(model))

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
def called(of_hidden: Callable[[Tensor, Head], Any], hidden: Tensor, head: Head) -> Any:
    return of_hidden(hidden, head)


def head_of(model: Any) -> Head:
    """What turns a causal LM's last hidden states into its logits.

    Raises ValueError where it is not a plain linear layer.
    """
    layer = output_layer(model)
    name = type(model).__name__
    # FSDP makes a class of its own of each class that it wraps.
    kinds = [kind for kind in type(layer).__mro__ if not kind.__name__.startswith("FSDP")]
    if kinds[0] is not nn.Linear:
        kind = f"{type(layer).__module__}.{type(layer).__name__}"
        raise ValueError(
            f"the head of {name} is a {kind}; fastp3o's losses need a plain linear layer. LoRA of the head itself is "
            "not supported: leave it out of --lora_targets, or of peft's target_modules; and out of quantisation "
            "(llm_int8_skip_modules of bitsandbytes)"
        )
    config = model.config
    return Head(
        layer.weight,
        bias=layer.bias,
        softcap=getattr(config, "final_logit_softcapping", None),
        # Granite divides its logits, Cohere multiplies them.
        temperature=getattr(config, "logits_scaling", None) or 1 / (getattr(config, "logit_scale", None) or 1.0),
    )


def output_layer(model: Any) -> Any:
    """A reward model's one is called score."""
    return getattr(model, "score", None) or model.get_output_embeddings()
