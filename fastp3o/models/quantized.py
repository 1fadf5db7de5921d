"""Bases of LoRA policies in 4 or 8 bits, by bitsandbytes: QLoRA (arXiv 2305.14314) and LLM.int8()
(arXiv 2208.07339).

Linear layers but the head are quantized as the model is loaded; embeddings, norms and adapters are
not. In 4 bits, and in 8 bits on a CPU, a layer's product is that of its dequantized weight; in 8
bits on a GPU its inputs are rounded, too.
"""

import logging
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from fastp3o.errors import UserError
from fastp3o.models.sharding import number_of_processes

PARAMETERS = ("Params4bit", "Int8Params")  # of bitsandbytes
# It warns in every pass that 8-bit products round their inputs.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def quantized_loading(bits: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` that quantize a model. bits: 4bit (NF4, with double
    quantization) or 8bit. Raises ValueError if bitsandbytes is not installed, and for several
    processes.
    """
    if number_of_processes() > 1:
        raise UserError(
            "--quantize trains in one process: quantized weights are not spread over several"
        )
    try:
        import bitsandbytes  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError as error:
        raise UserError("--quantize needs bitsandbytes: pip install '.[quantized]'") from error
    if bits == "4bit":
        settings = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        }
    else:
        settings = {"load_in_8bit": True}
    # Moved later, weights would leave their scales behind.
    return {
        "quantization_config": BitsAndBytesConfig(**settings),
        "device_map": {"": PartialState().device},
    }


def quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers with quantized weights by name, without the modules that wrap them."""
    weights = (
        (name, layer, layer._parameters.get("weight")) for name, layer in model.named_modules()
    )
    return {name: layer for name, layer, weight in weights if type(weight).__name__ in PARAMETERS}


def dequantized(layer: Any) -> Tensor:
    """The weight that a quantized layer multiplies by."""
    from bitsandbytes import functional  # type: ignore[import-not-found,unused-ignore]

    weight = layer.weight
    if type(weight).__name__ == "Params4bit":
        return functional.dequantize_4bit(weight.data, weight.quant_state)
    # Scales go from the weight to the layer with the first pass.
    scales = layer.state.SCB if layer.state.SCB is not None else weight.SCB
    return functional.int8_vectorwise_dequant(weight.data, scales)


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Sets the dtype in which 4-bit layers compute their products."""
    layers: list[Any] = [
        layer for layer in quantized_layers(model).values() if hasattr(layer, "compute_dtype")
    ]
    for layer in layers:
        layer.compute_dtype, layer.compute_type_is_set = dtype, True


def checked(model: Any) -> Any:
    """Returns the model, ready to train. Raises ValueError if its layers cannot be quantized
    correctly.
    """
    layers: dict[str, Any] = dict(quantized_layers(model))
    for name, layer in layers.items():
        if getattr(layer, "source_cls", None) is Conv1D:
            raise UserError(
                f"--quantize supports linear layers only, and {name} is a Conv1D, as in GPT-2"
            )
        layer.register_forward_pre_hook(in_training_mode)
        state = getattr(layer.weight, "quant_state", None)  # of 4 bits
        if (
            state is not None
            and layer.weight.device.type == "cpu"
            and state.shape[1] % state.blocksize
        ):
            # Dequantizing on a CPU begins a block with each row (0.50), and quantizing does not.
            needed = f"needs layers with a multiple of {state.blocksize} inputs on a CPU"
            raise UserError(f"--quantize 4bit {needed}, and {name} has {state.shape[1]}")
    return model


def in_training_mode(layer: nn.Module, _: object) -> None:
    """On a CPU layers compute otherwise in evaluation mode, and rollouts would be another policy's:
    8-bit layers round their inputs, and 4-bit ones pack their weights again if the CPU has
    AVX512-BF16.
    """
    layer.training = True
