"""Arithmetic of the models' bodies. Logits, log-probabilities, ratios and the optimizer are fp32 in
any case.

    fp32             weights and matrix products in fp32
    bf16-autocast    fp32 weights, matrix products in bf16
    bf16, fp16       weights and matrix products in half precision; trainable weights have an fp32 master copy that the
                     optimizer updates. fp16 resolves 8 times finer than bf16, but overflows at 65504: losses are scaled

P3O exponentiates the log-ratios of whole responses, so rounding in the body matters more than to
other losses: see training/precision.md. A model whose activations fp16 does not hold is computed in
bf16, which has the range of fp32.
"""

from typing import NamedTuple

import torch

from fastp3o_kernels.head.head import multiplies


class Precision(NamedTuple):
    """A model's arithmetic. name: one of `fastp3o.config.PRECISIONS`, except auto. weights: dtype
    of the parameters. autocast: dtype of matrix products; None if it is the weights'. automatic:
    whether it was not set, so that a model that overflows in it gets another.
    """

    name: str
    weights: torch.dtype
    autocast: torch.dtype | None
    automatic: bool = False

    @property
    def half(self) -> bool:
        """Whether the weights themselves are in half precision."""
        return self.weights.itemsize == 2

    @property
    def slow_on_cpu(self) -> bool:
        """Whether this processor lacks instructions for its products, and would train faster in
        fp32.
        """
        dtype = self.autocast or self.weights
        return dtype.itemsize == 2 and not multiplies(dtype)


def choose_precision(name: str, automatic: str) -> Precision:
    """Returns the precision with this name of PRECISIONS. "auto" is `automatic` on a GPU, else
    fp32; fp16 on a GPU that only emulates bf16 (before compute capability 8.0).
    """
    if name != "auto":
        return named_precision(name)
    name = automatic if torch.cuda.is_available() else "fp32"
    if name.startswith("bf16") and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = "fp16"
    return named_precision(name)._replace(automatic=True)


def named_precision(name: str) -> Precision:
    weights, autocast = {
        "fp32": (torch.float32, None),
        "bf16-autocast": (torch.float32, torch.bfloat16),
        "bf16": (torch.bfloat16, None),
        "fp16": (torch.float16, None),
    }[name]
    return Precision(name, weights, autocast)


def wider_precision(*, trains: bool) -> Precision:
    """A precision for a model that overflows fp16: bf16, where this device multiplies it, else
    fp32. A model that trains has a residual stream in fp32 (bf16-autocast), which rounds log-ratios
    less.
    """
    on_gpu = torch.cuda.is_available()
    native = (
        torch.cuda.is_bf16_supported(including_emulation=False)
        if on_gpu
        else multiplies(torch.bfloat16)
    )
    name = ("bf16-autocast" if trains else "bf16") if native else "fp32"
    return named_precision(name)._replace(automatic=True)
