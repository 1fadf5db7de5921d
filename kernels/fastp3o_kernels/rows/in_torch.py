"""The kernels over rows of logits in PyTorch, for the chunked head where there is no Triton.

They take the logits as `transform_` left them, and a few rows at a time, so that temporaries stay small. n rows, V
vocabulary.
"""

import torch
from torch import Tensor

from fastp3o_kernels.rows.transform import LogitsTransform, slope_

ROWS = 32


def logprobs(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Transformed logits [n, V], labels [n] -> log-probs [n]."""
    ignored = labels == ignore_index
    index = labels.masked_fill(ignored, 0).long()[:, None]
    of_rows = [
        rows.log_softmax(dim=1).gather(1, of_rows)
        for rows, of_rows in zip(logits.split(ROWS), index.split(ROWS), strict=True)
    ]
    return torch.cat(of_rows).squeeze(1).masked_fill(ignored, 0.0)


def dlogits(
    logits: Tensor, labels: Tensor, coefficients: Tensor, transform: LogitsTransform, ignore_index: int, out: Tensor
) -> None:
    """out [n, V] = the gradient of the head's products, given dL/d(log-prob) of each row. Leaves `logits` alone."""
    ignored = labels == ignore_index
    index = labels.masked_fill(ignored, 0).long()[:, None]
    coefficients = coefficients.masked_fill(ignored, 0.0)[:, None]
    for begin in range(0, len(logits), ROWS):
        part = slice(begin, begin + ROWS)
        p = torch.softmax(logits[part], dim=1, out=out[part])
        p.scatter_add_(1, index[part], p.new_full((len(p), 1), -1.0)).mul_(-coefficients[part])
        if transform.softcap is not None:
            p.mul_(slope_(logits[part].clone(), transform))
        elif transform.temperature != 1:
            p.div_(transform.temperature)
    # Rows of zero coefficient hold 0 times what may be NaN.
    out.masked_fill_(coefficients == 0, 0.0)
