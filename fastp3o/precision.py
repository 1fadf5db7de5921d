"""Arithmetic of the models' bodies. Logits, log-probabilities, ratios and the optimizer are fp32 in any case.

    fp32             weights and products in fp32
    bf16-autocast    fp32 weights, products in bf16
    bf16, fp16       weights and products in half precision; what trains has an fp32 master copy, which the optimizer
                     moves. fp16 has 8 times finer steps than bf16, but ends at 65504: losses are scaled for it

P3O exponentiates the log-ratios of whole responses, so the rounding of the body matters more than to other losses:
README's Precision section has figures.
"""

from typing import NamedTuple

import torch

PRECISIONS = ("auto", "fp32", "bf16-autocast", "bf16", "fp16")


class Precision(NamedTuple):
    """name: one of PRECISIONS but auto. weights: dtype of parameters. autocast: of products, None for the weights'."""

    name: str
    weights: torch.dtype
    autocast: torch.dtype | None

    @property
    def half(self) -> bool:
        """Whether the weights themselves are in half precision."""
        return self.weights.itemsize == 2


def precision_of(name: str, automatic: str) -> Precision:
    """`automatic` is what "auto" means on a GPU; without one it means fp32."""
    if name == "auto":
        name = automatic if torch.cuda.is_available() else "fp32"
    weights, autocast = {
        "fp32": (torch.float32, None),
        "bf16-autocast": (torch.float32, torch.bfloat16),
        "bf16": (torch.bfloat16, None),
        "fp16": (torch.float16, None),
    }[name]
    return Precision(name, weights, autocast)
