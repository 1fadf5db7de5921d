"""Log-probabilities and statistics as PyTorch graphs: the tests' oracle, the benchmarks' baseline, the CPU's way.

N tokens, n of them in a part, V vocabulary, S sequences. fp64 inputs are computed in fp64; narrower ones in fp32.
"""

import torch
from torch import Tensor

from fastp3o_kernels.rows.rows import NO_LABEL, Rows, gather_indices, slope, transformed


def at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def without_ignored(logits: Tensor, ignored: Tensor, ignore_index: int) -> Tensor:
    """Logits of at least fp32, 0 in ignored rows: the gradient of a row of -inf would be 0 times NaN."""
    logits = at_least_fp32(logits)
    return logits if ignore_index == NO_LABEL else logits.masked_fill(ignored.unsqueeze(1), 0.0)


def token_logprobs(logits: Tensor, labels: Tensor, *, temperature: float, ignore_index: int) -> Tensor:
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


# The kernels' work follows, for the chunked head where they do not run. A few rows go at a time, so that temporaries
# stay small.
ROWS_AT_ONCE = 32


def logprobs_in_parts(rows: Rows) -> Tensor:
    """[n]."""
    ignored, indices = gather_indices(rows.labels, rows.ignore_index)
    label_logprobs = [
        transformed(logits, rows.transform).log_softmax(dim=1).gather(1, index)
        for logits, index in zip(rows.logits.split(ROWS_AT_ONCE), indices.split(ROWS_AT_ONCE), strict=True)
    ]
    return torch.cat(label_logprobs).squeeze(1).masked_fill(ignored, 0.0)


def exponentials_in_place(rows: Rows) -> tuple[Tensor, Tensor]:
    """Puts e^(x − max) in the place of the logits, and returns log-probs of the labels and sums of the rows, [n] each.
    The gradient needs no second exponential then. There must be no soft cap.
    """
    ignored, indices = gather_indices(rows.labels, rows.ignore_index)
    logprobs, sums = (rows.logits.new_empty(len(rows.logits)) for _ in range(2))
    for begin in range(0, len(logprobs), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
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
    """Puts the gradient of the logits in the place of the exponentials, given dL/d(log-prob) and the rows' sums."""
    ignored, indices = gather_indices(rows.labels, rows.ignore_index)
    factors = (coefficients / rows.transform.temperature).masked_fill(ignored, 0.0).unsqueeze(1)
    shares = -factors / sums.unsqueeze(1)
    for begin in range(0, len(factors), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        rows.logits[part].mul_(shares[part]).scatter_add_(1, indices[part], factors[part])
    # Rows of zero coefficient hold 0 times what may be NaN.
    if (nothing := factors == 0).any():
        rows.logits.masked_fill_(nothing, 0.0)


def statistics_in_parts(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Entropies, mean logits and is_top, [n] each."""
    parts = [
        statistics(transformed(logits, rows.transform), labels, rows.ignore_index)
        for logits, labels in zip(rows.logits.split(ROWS_AT_ONCE), rows.labels.split(ROWS_AT_ONCE), strict=True)
    ]
    entropy, mean_logit, is_top = (torch.cat(values) for values in zip(*parts, strict=True))
    return entropy, mean_logit, is_top


def dlogits(rows: Rows, coefficients: Tensor, entropy_coefficients: Tensor | None, out: Tensor) -> None:
    """out [n, V] = the gradient of the logits, which stay, given dL/d(log-prob) and maybe dL/d(entropy) of each row."""
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
