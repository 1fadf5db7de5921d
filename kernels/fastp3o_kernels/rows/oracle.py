"""Log-probabilities and statistics as PyTorch graphs: the tests' oracle, the benchmarks' baseline.

N tokens, V vocabulary, S sequences. fp64 inputs are computed in fp64; narrower ones in fp32.
"""

import torch
from torch import Tensor

from fastp3o_kernels.rows.rows import NO_LABEL, gather_indices


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
