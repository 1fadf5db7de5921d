"""The kernels over rows of logits in PyTorch, for the chunked head where there is no Triton.

They take the logits as `transform_` left them, and a few rows at a time, so that temporaries stay small. n rows, V
vocabulary.
"""

import torch
from torch import Tensor

from fastp3o_kernels.transform import LogitsTransform, slope_

ROWS = 16


def logprobs(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Transformed logits [n, V], labels [n] -> log-probs, row maxima and log-sums, [n] each."""
    row_max = logits.amax(dim=1)
    base = row_max.masked_fill(row_max == -float("inf"), 0.0)
    log_sum = torch.cat(
        [
            rows.sub(of_rows[:, None]).exp_().sum(dim=1)
            for rows, of_rows in zip(logits.split(ROWS), base.split(ROWS), strict=True)
        ]
    ).log_()
    ignored = labels == ignore_index
    of_labels = logits.gather(1, labels.masked_fill(ignored, 0).long()[:, None]).squeeze(1)
    return ((of_labels - row_max) - log_sum).masked_fill(ignored, 0.0), row_max, log_sum


def dlogits(
    logits: Tensor,
    labels: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    coefficients: Tensor,
    transform: LogitsTransform,
    ignore_index: int,
    out: Tensor,
) -> None:
    """out [n, V] = the gradient of the head's products, given dL/d(log-prob) of each row. Leaves `logits` alone."""
    ignored = labels == ignore_index
    labels = labels.masked_fill(ignored, 0).long()[:, None]
    coefficients = coefficients.masked_fill(ignored, 0.0)[:, None]
    for begin in range(0, len(logits), ROWS):
        part = slice(begin, begin + ROWS)
        p = torch.sub(logits[part], row_max[part, None], out=out[part]).sub_(log_sum[part, None]).exp_()
        p.scatter_add_(1, labels[part], p.new_full((len(p), 1), -1.0)).mul_(-coefficients[part])
        slope = slope_(logits[part].clone(), transform)
        if slope is not None:
            p.mul_(slope)
        elif transform.temperature != 1:
            p.div_(transform.temperature)
    # Rows of zero coefficient hold 0 times what may be NaN.
    out.masked_fill_(coefficients == 0, 0.0)
