"""Log-probabilities and statistics as PyTorch graphs: what a CPU computes, and the baseline of the
benchmarks.

N tokens, n of them in a part, V vocabulary, S sequences. fp64 inputs are computed in fp64; narrower
ones in fp32.
"""

from collections.abc import Iterator
from math import nan

import torch
from torch import Tensor

from fastp3o_kernels.rows.rows import NO_LABEL, Rows, capped, gather_indices, slope


def at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def without_ignored(logits: Tensor, ignored: Tensor, ignore_index: int) -> Tensor:
    """Logits of at least fp32, 0 in ignored rows: the gradient of a row of -inf would be 0 times
    NaN. Nothing is copied where the host sees, without waiting, that no ignored row is one.
    """
    logits = at_least_fp32(logits)
    if ignore_index == NO_LABEL:
        return logits
    if logits.device.type == "cpu" and logits.detach()[ignored].amax(1).isfinite().all():
        return logits
    return logits.masked_fill(ignored.unsqueeze(1), 0.0)


def token_logprobs(
    logits: Tensor, labels: Tensor, *, temperature: float, ignore_index: int
) -> Tensor:
    """logits [N, V], labels [N] -> [N]."""
    ignored, indices = gather_indices(labels, ignore_index)
    logits = without_ignored(logits, ignored, ignore_index)
    logprobs = (logits if temperature == 1 else logits / temperature).log_softmax(dim=-1)
    return logprobs.gather(1, indices).squeeze(1).masked_fill(ignored, 0.0)


def statistics(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Entropies, mean logits and is_top (`TokenOutputs`) of rows [N, V], as the logits stand."""
    ignored, indices = gather_indices(labels, ignore_index)
    logits = without_ignored(logits, ignored, ignore_index)
    logprobs = logits.log_softmax(1)
    # 0 log 0 is 0, also for the gradient.
    terms = logprobs.exp() * logprobs.masked_fill(logprobs == float("-inf"), 0.0)
    is_top = logits.detach().gather(1, indices).squeeze(1) >= logits.detach().amax(1)
    return (
        -terms.sum(1).masked_fill(ignored, 0.0),
        logits.detach().mean(1).masked_fill(ignored, 0.0),
        is_top & ~ignored,
    )


def sequence_logprobs(token_logprobs: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sums over each sequence, [N] -> [S], in fixed order."""
    lengths = cu_seqlens.long().diff()
    return torch.segment_reduce(at_least_fp32(token_logprobs), "sum", lengths=lengths, unsafe=True)


# The kernels' work follows, with their arguments and results, for the chunked head where they do
# not run. A few rows go at a time, so that temporaries stay small.
ROWS_AT_ONCE = 32


def parts(rows: Rows) -> Iterator[slice]:
    return (
        slice(first, first + ROWS_AT_ONCE) for first in range(0, len(rows.logits), ROWS_AT_ONCE)
    )


def label_indices(rows: Rows) -> tuple[Tensor, Tensor]:
    """Flags of the labels within the vocabulary [n, 1], and indices [n, 1] into it, 0 for the
    others.
    """
    labels = rows.labels.unsqueeze(1)
    within = (labels >= 0) & (labels < rows.logits.shape[1])
    return within, labels.masked_fill(~within, 0).long()


def below_max(logits: Tensor, row_max: Tensor, temperature: float) -> Tensor:
    """Logits before the temperature [n, V] -> what is left of them below the maxima, after it."""
    below = logits - row_max.unsqueeze(1)
    return below if temperature == 1 else below.div_(temperature)


def logprobs_in_parts(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the labels, row maxima before the temperature and log-sums, [n] each. A label
    outside the vocabulary gives NaN.
    """
    within, indices = label_indices(rows)
    logprobs, row_max, log_sum = (rows.logits.new_empty(len(rows.logits)) for _ in range(3))
    for part in parts(rows):
        logits = capped(rows.logits[part], rows.transform)
        # -inf minus it is -inf, and not NaN.
        row_max[part] = logits.amax(1).clamp_(min=torch.finfo(logits.dtype).min)
        below = below_max(logits, row_max[part], rows.transform.temperature)
        logprobs[part] = below.gather(1, indices[part]).squeeze(1)
        log_sum[part] = below.exp_().sum(1).log_()
    logprobs.sub_(log_sum).masked_fill_(~within.squeeze(1), nan)
    return logprobs.masked_fill_(rows.labels == rows.ignore_index, 0.0), row_max, log_sum


def exponentials_in_place(rows: Rows) -> tuple[Tensor, Tensor]:
    """Puts e^(x − max) in the place of the logits, and returns log-probs of the labels and sums of
    the rows, [n] each. The gradient needs no second exponential then. There must be no soft cap.
    """
    ignored, indices = gather_indices(rows.labels, rows.ignore_index)
    logprobs, sums = (rows.logits.new_empty(len(rows.logits)) for _ in range(2))
    for part in parts(rows):
        logits = rows.logits[part]
        if rows.transform.bias is not None:
            logits += rows.transform.bias
        if rows.transform.temperature != 1:
            logits /= rows.transform.temperature
        logits -= logits.amax(1, keepdim=True)
        label = logits.gather(1, indices[part]).squeeze(1)
        torch.sum(logits.exp_(), 1, out=sums[part])
        logprobs[part] = label - sums[part].log()
    return logprobs.masked_fill_(ignored, 0.0), sums


def dlogits_of_exponentials(rows: Rows, coefficients: Tensor, sums: Tensor) -> None:
    """Puts the gradient of the logits in the place of the exponentials, given dL/d(log-prob) and
    the rows' sums.
    """
    ignored, indices = gather_indices(rows.labels, rows.ignore_index)
    factors = (coefficients / rows.transform.temperature).masked_fill(ignored, 0.0).unsqueeze(1)
    shares = -factors / sums.unsqueeze(1)
    for part in parts(rows):
        rows.logits[part].mul_(shares[part]).scatter_add_(1, indices[part], factors[part])
    # Rows of zero coefficient hold 0 times what may be NaN.
    if (nothing := factors == 0).any():
        rows.logits.masked_fill_(nothing, 0.0)


def statistics_in_parts(
    rows: Rows, row_max: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Entropies, mean logits and is_top, [n] each."""
    within, indices = label_indices(rows)
    entropy, mean_logit, label_logits = (torch.empty_like(row_max) for _ in range(3))
    for part in parts(rows):
        logits = capped(rows.logits[part], rows.transform)
        logprobs = below_max(logits, row_max[part], rows.transform.temperature).sub_(
            log_sum[part].unsqueeze(1)
        )
        p = logprobs.exp()
        entropy[part] = -p.mul_(logprobs.masked_fill_(p == 0, 0.0)).sum(1)
        mean_logit[part] = logits.mean(1) / rows.transform.temperature
        label_logits[part] = logits.gather(1, indices[part]).squeeze(1)
    counts = rows.labels != rows.ignore_index
    is_top = counts & within.squeeze(1) & (label_logits >= row_max)
    return entropy.masked_fill_(~counts, 0.0), mean_logit.masked_fill_(~counts, 0.0), is_top


def dlogits(
    rows: Rows,
    row_max: Tensor,
    log_sum: Tensor,
    coefficients: Tensor,
    out: Tensor,
    entropy: Tensor | None,
    entropy_coefficients: Tensor | None,
    dbias: Tensor | None = None,
) -> None:
    """out [n, V] = the gradient of the logits, which stay, given dL/d(log-prob) and maybe
    dL/d(entropy) of each row. dbias: [V], which the sum of these gradients is added to, or None.
    """
    ignored = rows.labels == rows.ignore_index
    within, indices = label_indices(rows)
    coefficients = coefficients.masked_fill(ignored, 0.0).unsqueeze(1)
    if entropy_coefficients is not None:
        entropy_coefficients = entropy_coefficients.masked_fill(ignored, 0.0).unsqueeze(1)
    shares, labels = (-log_sum).exp().unsqueeze(1), coefficients.masked_fill(~within, 0.0)
    # Rows of zero coefficient hold 0 times what may be NaN.
    nothing = coefficients == 0
    if entropy_coefficients is not None:
        nothing &= entropy_coefficients == 0
    for part in parts(rows):
        # In the dtype of the logits, which may be wider than that of `out`: rounded once, at the
        # end.
        below = below_max(
            capped(rows.logits[part], rows.transform), row_max[part], rows.transform.temperature
        )
        p, factors = below.exp().mul_(shares[part]), -coefficients[part]
        if entropy is not None and entropy_coefficients is not None:
            # d entropy / d logits = −p (log p + entropy)
            log_p_and_entropy = below.add_((entropy - log_sum)[part].unsqueeze(1)).masked_fill_(
                p == 0, 0.0
            )
            factors = log_p_and_entropy.mul_(-entropy_coefficients[part]).add_(factors)
        gradient = p.mul_(factors).scatter_add_(1, indices[part], labels[part])
        out[part] = gradient.mul_(slope(rows.logits[part], rows.transform)).masked_fill_(
            nothing[part], 0.0
        )
        if dbias is not None:
            dbias += gradient.sum(0)
