"""The kernels' work on rows of logits in PyTorch: for the chunked head where the kernels do not run.

A few rows go at a time, so that temporaries stay small. n rows, V vocabulary.
"""

import torch
from torch import Tensor

from fastp3o_kernels.rows import oracle
from fastp3o_kernels.rows.rows import Rows, gather_indices, slope, transformed

ROWS_AT_ONCE = 32


def logprobs(rows: Rows) -> Tensor:
    """[n]."""
    ignored, indices = gather_indices(rows.labels, rows.ignore_index)
    label_logprobs = [
        transformed(logits, rows.transform).log_softmax(dim=1).gather(1, index)
        for logits, index in zip(rows.logits.split(ROWS_AT_ONCE), indices.split(ROWS_AT_ONCE), strict=True)
    ]
    return torch.cat(label_logprobs).squeeze(1).masked_fill(ignored, 0.0)


def statistics(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Entropies, mean logits and is_top, [n] each."""
    parts = [
        oracle.statistics(transformed(logits, rows.transform), labels, rows.ignore_index)
        for logits, labels in zip(rows.logits.split(ROWS_AT_ONCE), rows.labels.split(ROWS_AT_ONCE), strict=True)
    ]
    entropy, mean_logit, is_top = (torch.cat(values) for values in zip(*parts, strict=True))
    return entropy, mean_logit, is_top


def dlogits(rows: Rows, coefficients: Tensor, entropy_coefficients: Tensor | None, out: Tensor) -> None:
    """out [n, V] = the gradient of the logits, given dL/d(log-prob) of each row and, if it counts, dL/d(entropy).
    Leaves the logits as they are.
    """
    ignored, indices = gather_indices(rows.labels, rows.ignore_index)
    coefficients = coefficients.masked_fill(ignored, 0.0).unsqueeze(1)
    if entropy_coefficients is not None:
        entropy_coefficients = entropy_coefficients.masked_fill(ignored, 0.0).unsqueeze(1)
    for begin in range(0, len(out), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        # In the dtype of the logits, which may be wider than that of `out`: rounded once, at the end.
        scaled = transformed(rows.logits[part], rows.transform)
        gradient = torch.softmax(scaled, dim=1)
        gradient.scatter_add_(1, indices[part], gradient.new_full((len(gradient), 1), -1.0)).mul_(-coefficients[part])
        gradient += 0.0 if entropy_coefficients is None else entropy_coefficients[part] * entropy_slope(scaled)
        out[part] = gradient.mul_(slope(rows.logits[part], rows.transform))
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
