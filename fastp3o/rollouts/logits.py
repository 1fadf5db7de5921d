"""Logits from hidden states, in fp32 whatever the precision of the policy."""

from torch import Tensor

from fastp3o.models.packed_model import Head
from fastp3o_kernels.head.forward import Products, multiply
from fastp3o_kernels.rows.transform import LogitsTransform, transform_


def head_logits(hidden: Tensor, head: Head) -> Tensor:
    """[R, D] -> [R, V], fp32 or fp64."""
    products = Products(hidden)
    logits = hidden.new_empty(len(hidden), len(head.weight), dtype=products.logits)
    multiply(products.operand(hidden), products.operand(head.weight).T, out=logits)
    transform_(logits, LogitsTransform(head.bias, head.softcap, head.temperature))
    return logits
