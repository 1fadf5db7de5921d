"""What turns a causal LM's hidden states into its logits: read from its configuration, and tried once.

D hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fastp3o_kernels.head.head import Head
from fastp3o_kernels.rows.rows import LogitsTransform, transformed

# Configurations have names of their own for what divides logits, multiplies them, and caps them after that.
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")  # Granite and MiniCPM3, Inkling
FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # Cohere, Falcon-H1, Muse
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma, RecurrentGemma, xLSTM

# Products that every soft cap in use bends, and tokens to look at.
LARGEST_PRODUCT = 100.0
TOKENS = 3
# Of the largest logit, or of all hidden states: rounding to bf16 stays below, a scale or a cap far above.
TOLERANCE = 0.02


def head_of(model: Any) -> Head:
    """What turns a causal LM's last hidden states into its logits, as far as its configuration says.

    Raises ValueError where it is not a plain linear layer.
    """
    layer = output_layer(model)
    # FSDP makes a class of its own of each class that it wraps.
    kinds = [kind for kind in type(layer).__mro__ if not kind.__name__.startswith("FSDP")]
    if kinds[0] is not nn.Linear:
        kind = f"{type(layer).__module__}.{type(layer).__name__}"
        raise ValueError(
            f"the head of {type(model).__name__} is a {kind}; fastp3o's losses need a plain linear layer. LoRA of the "
            "head itself is not supported: leave it out of --lora_targets, or of peft's target_modules; and out of "
            "quantisation (llm_int8_skip_modules of bitsandbytes)"
        )
    config = model.config.get_text_config()
    divisor, factor = first_of(config, DIVISORS) or 1.0, first_of(config, FACTORS) or 1.0
    if config.model_type.startswith("hyperclovax"):
        divisor, factor = 1.0, divisor
    softcap = first_of(config, SOFTCAPS)
    return Head(
        layer.weight,
        bias=layer.bias,
        # Models scale before they cap: c tanh(s z / c) = s (c/s) tanh(z / (c/s)).
        softcap=None if softcap is None else softcap * divisor / factor,
        temperature=divisor / factor,
    )


def first_of(config: Any, names: tuple[str, ...]) -> float | None:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def output_layer(model: Any) -> Any:
    """A reward model's one is called score."""
    return getattr(model, "score", None) or model.get_output_embeddings()


@torch.no_grad()
def check_trial(model: Any, transform: LogitsTransform, device: torch.device) -> None:
    """A model may do with its logits what we do not know: it gets known products in place of its head's, on a few
    tokens, and must make the logits of them that the transform makes.

    The class's own forward is called, whatever was put in its place, and dropout is off.

    Raises ValueError where it makes others, or gives the head something else than the body's last hidden states.
    """
    refused = f"fastp3o's losses would be wrong with {type(model).__name__}: "
    layer, seen = output_layer(model), []

    def known_products(_: nn.Module, inputs: tuple[Tensor], products: Tensor) -> Tensor:
        seen.append(inputs[0].float())
        values = torch.linspace(-LARGEST_PRODUCT, LARGEST_PRODUCT, products.shape[-1], device=products.device)
        return values.to(products.dtype).expand_as(products).clone()  # which some models overwrite

    # From the middle of the vocabulary, where there is no padding.
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
    if [given.shape for given in seen] != [hidden.shape]:
        raise ValueError(f"{refused}its forward pass does not call its head once on the hidden states of all tokens")
    # Some models scale what goes into the head.
    given = seen[0].to(hidden.device)
    share = (given * hidden).sum() / hidden.square().sum()
    if (given - share * hidden).norm() > TOLERANCE * given.norm():
        raise ValueError(f"{refused}its head takes something else than the last hidden states of its body")
    products = torch.linspace(-LARGEST_PRODUCT, LARGEST_PRODUCT, layer.weight.shape[0], device=logits.device)
    expected = transformed((products / share.to(logits.device)).expand(1, TOKENS, -1), transform)
    if logits.shape != expected.shape:
        raise ValueError(f"{refused}its logits have shape {list(logits.shape)}, and its head's {list(expected.shape)}")
    if (logits - expected).abs().max() > TOLERANCE * expected.abs().max():
        raise ValueError(
            f"{refused}it scales, caps or masks its logits by more than we read from its configuration (soft cap "
            f"{transform.softcap}, divided by {transform.temperature:g})"
        )
