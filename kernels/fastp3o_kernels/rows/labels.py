"""Labels that are ignored. n tokens."""

from torch import Tensor

# As ignore_index: no label is ignored.
NO_LABEL = -(2**31)


def gather_indices(labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Which labels [n] are ignored, and indices [n, 1] into a vocabulary, 0 for those."""
    ignored = labels == ignore_index
    return ignored, labels.masked_fill(ignored, 0).long().unsqueeze(1)
