"""A gradient of logits that takes the logits' own memory, on request. N rows, V vocabulary."""

import torch
from torch import Tensor


class DlogitsMemory:
    """Where a backward pass writes the gradient of the logits: new memory, or over the logits, and then only once."""

    def __init__(self, *, inplace: bool):
        self.inplace = inplace
        self.overwritten = False

    def check_first_use(self) -> None:
        """Raises RuntimeError for a second backward pass over logits that the first one overwrote."""
        if self.overwritten:
            raise RuntimeError("the logits were overwritten by the first backward pass (inplace_backward=True)")
        self.overwritten = self.inplace

    def like(self, logits: Tensor) -> Tensor:
        """[N, V]; where they are the logits themselves, autograd is told."""
        if not self.inplace:
            return torch.empty_like(logits)
        torch.autograd.graph.increment_version(logits)
        return logits


def with_distinct_rows(logits: Tensor) -> Tensor:
    """The logits where the kernels can read and write rows apart from each other, else a contiguous copy."""
    distinct = logits.shape[0] == 1 or logits.stride(0) >= logits.shape[1]
    return logits if logits.stride(1) == 1 and distinct else logits.contiguous()


def check_inplace(logits: Tensor, inplace_backward: bool) -> None:
    if inplace_backward and logits.requires_grad and logits.is_leaf:
        raise ValueError("inplace_backward=True would overwrite logits, which is a leaf: its values are yours to keep")
