"""What the kernels do with rows of logits, in PyTorch: for the chunked head where the kernels do not run.

The logits come as the head's bare products. A few rows go at a time, so that temporaries stay small. n rows, V
vocabulary.
"""

import torch
from torch import Tensor

from fastp3o_kernels.rows.labels import gather_indices
from fastp3o_kernels.rows.statistics import of_logits
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


def statistics(
    logits: Tensor, labels: Tensor, transform: LogitsTransform, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Entropies, mean logits and is_top [n] of logits before the transform."""
    parts = [
        of_logits(transformed(rows, transform), rows_labels, ignore_index)
        for rows, rows_labels in zip(logits.split(ROWS_AT_ONCE), labels.split(ROWS_AT_ONCE), strict=True)
    ]
    entropy, mean_logit, is_top = (torch.cat(values) for values in zip(*parts, strict=True))
    return entropy, mean_logit, is_top


def dlogits(
    logits: Tensor,
    labels: Tensor,
    coefficients: Tensor,
    transform: LogitsTransform,
    ignore_index: int,
    out: Tensor,
    entropy_coefficients: Tensor | None = None,
) -> None:
    """out [n, V] = the gradient of the head's products, given dL/d(log-prob) and, if it counts, dL/d(entropy) of each
    row. Leaves `logits` alone.
    """
    ignored, indices = gather_indices(labels, ignore_index)
    coefficients = coefficients.masked_fill(ignored, 0.0).unsqueeze(1)
    if entropy_coefficients is not None:
        entropy_coefficients = entropy_coefficients.masked_fill(ignored, 0.0).unsqueeze(1)
    for begin in range(0, len(logits), ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        # In the dtype of the logits, which may be wider than that of `out`: rounded once, at the end.
        scaled = transformed(logits[rows], transform)
        gradient = torch.softmax(scaled, dim=1)
        of_entropy = 0.0 if entropy_coefficients is None else entropy_coefficients[rows] * entropy_slope(scaled)
        gradient.scatter_add_(1, indices[rows], gradient.new_full((len(gradient), 1), -1.0)).mul_(-coefficients[rows])
        gradient += of_entropy
        out[rows] = gradient.mul_(slope(logits[rows], transform))
    # Rows of zero coefficient hold 0 times what may be NaN.
    nothing = coefficients == 0
    out.masked_fill_(nothing if entropy_coefficients is None else nothing & (entropy_coefficients == 0), 0.0)


def entropy_slope(logits: Tensor) -> Tensor:
    """d entropy / d logits = −p (log p + entropy), [n, V]."""
    logprobs = logits.log_softmax(1)
    p = logprobs.exp()
    logprobs = logprobs.masked_fill_(p == 0, 0.0)
    entropy = -(p * logprobs).sum(1, keepdim=True)
    return -p * (logprobs + entropy)
