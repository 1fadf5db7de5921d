"""Losses within a model's own forward call, where wrappers see them: DDP reduces, FSDP gathers,
autocast holds.

The head that turns hidden states into logits is read from the model's configuration, and tried
once.

D hidden size, V vocabulary.
"""

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

from fastp3o_kernels.head.head import Head, gather
from fastp3o_kernels.operation import graph_break
from fastp3o_kernels.rows.rows import LogitsTransform, transformed

Model = TypeVar("Model", bound=nn.Module)

NOT_REDUCED = (
    "model(..., head_loss=...) is called with several processes and outside of DDP and FSDP: nobody adds up their "
    "gradients. Call the wrapper, ddp(..., head_loss=...), not ddp.module. Ignore this if you reduce them elsewhere"
)

# Each family names differently what divides logits, multiplies them, and then caps them.
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")  # Granite and MiniCPM3, Inkling
FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # Cohere, Falcon-H1, Muse
# Gemma, RecurrentGemma, xLSTM.
SOFTCAPS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
)

# Products that every soft cap in use bends, and tokens to look at.
LARGEST_PRODUCT = 100.0
TOKENS = 3
# Share of the largest logit, or of all hidden states, that may differ: bf16 stays below, a scale or
# cap far above it.
TOLERANCE = 0.02


# --- a model's forward call -----------------------------------------------------------------------


def expose_head(model: Model) -> Model:
    """Makes model(..., head_loss=function) return function(hidden, head): the body's last hidden
    states, and the `Head` that would make logits of them. Everything else stays.

        expose_head(model)
        model = DDP(model)  # or fully_shard(model), accelerator.prepare(model), peft's get_peft_model(model, ...)
        loss = model(input_ids=ids, attention_mask=mask, head_loss=lambda hidden, head: linear_p3o_loss(
            hidden.flatten(0, 1)[tokens.predicted_at], head, tokens.labels, tokens.cu_seqlens, ...).loss)

    The function must not keep hidden states or head: outside of the call their weights may be gone.
    With FSDP2 (`fully_shard`) the head may be in the root's group or in one of its own. A call that
    goes past the wrapper, such as ddp.module(...), would leave each process with its own gradients:
    it warns.

    model: a causal LM of transformers, or a peft model of one, before it is wrapped or prepared.

    Raises ValueError for a model that is wrapped already. Calls raise it for a head that is not a
    plain linear layer (an adapter on it, a quantized one), and the first one for a model that makes
    its logits in another way, which a trial on a few tokens shows; losses raise it for a weight
    that is spread over processes and not gathered.
    """
    outer: Any = model
    inner: Any = outer.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(inner, "base_model") or not hasattr(inner, "get_output_embeddings"):
        raise ValueError(
            f"expose_head takes a causal LM of transformers, before it is wrapped, and got a {type(model).__name__}"
        )
    if hasattr(inner, "_forward_to_logits"):
        # It still is inside whatever has wrapped the forward method since.
        return model
    if hasattr(inner, "_original_forward"):
        raise ValueError(
            "accelerate has prepared the model: call expose_head before accelerator.prepare"
        )
    # Bound methods, which a deep copy of the model binds to the copy; a closure would compute with
    # this one's weights.
    inner._forward_to_logits = inner.forward
    # A reward model makes no logits of all tokens that could be compared.
    inner._head_was_tried = hasattr(inner, "score")
    inner.forward = MethodType(with_head_loss(inner.forward), inner)
    return model


def with_head_loss(whole: Callable[..., Any]) -> Callable[..., Any]:
    """A forward method that takes `head_loss`. It keeps the signature of the whole one, which
    `generate` reads.
    """

    @wraps(getattr(whole, "__func__", whole))
    def forward(
        model: Any,
        *arguments: Any,
        head_loss: Callable[[Tensor, Head], Any] | None = None,
        **options: Any,
    ) -> Any:
        if head_loss is None:
            return model._forward_to_logits(*arguments, **options)
        if torch.is_grad_enabled() and nobody_reduces(model):
            warnings.warn(NOT_REDUCED, stacklevel=2)
        return called(head_loss, model.base_model(*arguments, **options).last_hidden_state, model)

    return forward


def nobody_reduces(model: nn.Module) -> bool:
    """Whether there are several processes, and neither DDP nor FSDP sees this call."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        return False
    # FSDP derives a class from each class that it wraps.
    return not any(type(module).__name__.startswith("FSDP") for module in model.modules())


@graph_break
def called(head_loss: Callable[[Tensor, Head], Any], hidden: Tensor, model: Any) -> Any:
    if not model._head_was_tried:
        # The trial waits for the first call: many models cannot run before they are on their
        # device.
        check_trial(model, replace(model_head(model), bias=None), hidden.device)
        model._head_was_tried = True
    gather(output_layer(model))
    return head_loss(hidden, model_head(model))


# --- its head -------------------------------------------------------------------------------------


def model_head(model: Any) -> Head:
    """The head of a causal LM, which turns its last hidden states into its logits, by its
    configuration. Raises ValueError if it is not a plain linear layer.
    """
    layer = output_layer(model)
    # FSDP derives a class from each class that it wraps.
    kinds = [kind for kind in type(layer).__mro__ if not kind.__name__.startswith("FSDP")]
    if kinds[0] is not nn.Linear:
        kind = f"{type(layer).__module__}.{type(layer).__name__}"
        raise ValueError(
            f"the head of {type(model).__name__} is a {kind}; fastp3o's losses need a plain linear layer. LoRA of the "
            "head itself is not supported: leave it out of --lora_targets, or of peft's target_modules; and out of "
            "quantization (llm_int8_skip_modules of bitsandbytes)"
        )
    config = model.config.get_text_config()
    divisor, factor = first_setting(config, DIVISORS) or 1.0, first_setting(config, FACTORS) or 1.0
    if config.model_type.startswith("hyperclovax"):
        divisor, factor = 1.0, divisor
    softcap = first_setting(config, SOFTCAPS)
    return Head(
        layer.weight,
        bias=layer.bias,
        # Models scale before they cap: c tanh(s z / c) = s (c/s) tanh(z / (c/s)).
        softcap=None if softcap is None else softcap * divisor / factor,
        temperature=divisor / factor,
    )


def first_setting(config: Any, names: tuple[str, ...]) -> float | None:
    return next(
        (value for name in names if (value := getattr(config, name, None)) is not None), None
    )


def output_layer(model: Any) -> Any:
    """A causal LM's output embeddings, or a reward model's `score`."""
    return getattr(model, "score", None) or model.get_output_embeddings()


# --- a trial --------------------------------------------------------------------------------------


@torch.no_grad()
def check_trial(model: Any, transform: LogitsTransform, device: torch.device) -> None:
    """Checks on a few tokens that a model makes its logits as the transform does. A model's code
    may do more than its configuration says, so the trial replaces its head's products by known
    ones.

    The class's own forward is called, even if another was put in its place, and dropout is off.

    Raises ValueError for other logits, and for a head that gets something else than the body's last
    hidden states.
    """
    refused = f"fastp3o's losses would be wrong with {type(model).__name__}: "
    layer, seen = output_layer(model), []

    def known_products(_: nn.Module, inputs: tuple[Tensor], products: Tensor) -> Tensor:
        seen.append(inputs[0].float())
        values = torch.linspace(
            -LARGEST_PRODUCT, LARGEST_PRODUCT, products.shape[-1], device=products.device
        )
        return values.to(products.dtype).expand_as(products).clone()  # which some models overwrite

    # Tokens in the middle of the vocabulary are no padding.
    ids = layer.weight.shape[0] // 2 + torch.arange(TOKENS, device=device)[None]
    training = [module for module in model.modules() if module.training]
    handle = layer.register_forward_hook(known_products)
    try:
        model.eval()
        hidden = model.base_model(input_ids=ids).last_hidden_state.float()
        logits = type(model).forward(model, input_ids=ids).logits.float()
    except Exception as error:  # from anywhere in a model that wants more than tokens
        raise ValueError(f"{refused}a trial on {TOKENS} tokens failed with: {error}") from error
    finally:
        handle.remove()
        for module in training:
            module.training = True
    if [inputs.shape for inputs in seen] != [hidden.shape]:
        raise ValueError(
            f"{refused}its forward pass does not call its head once on the hidden states of all tokens"
        )
    # Some models scale what goes into the head.
    inputs = seen[0].to(hidden.device)
    share = (inputs * hidden).sum() / hidden.square().sum()
    if (inputs - share * hidden).norm() > TOLERANCE * inputs.norm():
        raise ValueError(
            f"{refused}its head takes something else than the last hidden states of its body"
        )
    products = torch.linspace(
        -LARGEST_PRODUCT, LARGEST_PRODUCT, layer.weight.shape[0], device=logits.device
    )
    expected = transformed((products / share.to(logits.device)).expand(1, TOKENS, -1), transform)
    if logits.shape != expected.shape:
        raise ValueError(
            f"{refused}its logits have shape {list(logits.shape)}, and its head's {list(expected.shape)}"
        )
    if (logits - expected).abs().max() > TOLERANCE * expected.abs().max():
        raise ValueError(
            f"{refused}it scales, caps or masks its logits by more than we read from its configuration (soft cap "
            f"{transform.softcap}, divided by {transform.temperature:g})"
        )
