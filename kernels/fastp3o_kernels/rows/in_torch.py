"""What the kernels do with rows of logits, in PyTorch: for the chunked head where the kernels do not run.

The logits come as the head's bare products. A few rows go at a time, so that temporaries stay small. n rows, V
vocabulary.
"""

import torch
from torch import Tensor

from fastp3o_kernels.rows.labels import gather_indices
from fastp3o_kernels.rows.transform import LogitsTransform, slope, transformed

ROWS_AT_ONCE = 32


def logprobs(logits: Tensor, labels: Tensor, transform: LogitsTransform, ignore_index: int) -> Tensor:
    """Logits before the transform [n, V], labels [n] -> log-probs [n]."""
    ignored, indices = gather_indices(labels, ignore_index)
    label_logprobs = [
        transformed(rows, transform).log_softmax(dim=1).gather(1, rows_indices)
        for rows, rows_indices in zip(logits.split(ROWS_AT_ONCE), indices.split(ROWS_AT_ONCE), strict=True)
    ]
    return torch.cat(label_logprobs).squeeze(1).masked_fill(ignored, 0.0)


def dlogits(
    logits: Tensor, labels: Tensor, coefficients: Tensor, transform: LogitsTransform, ignore_index: int, out: Tensor
) -> None:
    """out [n, V] = the gradient of the head's products, given dL/d(log-prob) of each row. Leaves `logits` alone."""
    ignored, indices = gather_indices(labels, ignore_index)
    coefficients = coefficients.masked_fill(ignored, 0.0).unsqueeze(1)
    for begin in range(0, len(logits), ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        # In the dtype of the logits, which may be wider than that of `out`: rounded once, at the end.
        gradient = torch.softmax(transformed(logits[rows], transform), dim=1)
        gradient.scatter_add_(1, indices[rows], gradient.new_full((len(gradient), 1), -1.0)).mul_(-coefficients[rows])
        out[rows] = gradient.mul_(slope(logits[rows], transform))
    # Rows of zero coefficient hold 0 times what may be NaN.
    out.masked_fill_(coefficients == 0, 0.0)
