"""Logits from hidden states, in fp32 whatever the precision of the policy."""

from torch import Tensor

from fastp3o_kernels import Head
from fastp3o_kernels.head.dtypes import HeadDtypes, multiply
from fastp3o_kernels.rows.rows import transformed


def head_logits(hidden: Tensor, head: Head) -> Tensor:
    """[R, D] -> [R, V], fp32 or fp64."""
    dtypes = HeadDtypes.for_hidden(hidden)
    logits = hidden.new_empty(len(hidden), len(head.weight), dtype=dtypes.logits)
    multiply(dtypes.cast(hidden), dtypes.cast(head.weight).T, out=logits)
    return transformed(logits, head)
