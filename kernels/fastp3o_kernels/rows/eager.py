"""Log-probabilities as PyTorch graphs: the oracle of the tests, the baseline of the benchmarks.

N tokens, V vocabulary, S sequences. fp64 inputs are computed in fp64; narrower ones in fp32.
"""

import torch
from torch import Tensor

from fastp3o_kernels.rows.labels import NO_LABEL, gather_indices


def at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def token_logprobs(logits: Tensor, labels: Tensor, *, temperature: float, ignore_index: int) -> Tensor:
    """logits [N, V], labels [N] -> [N]."""
    ignored, indices = gather_indices(labels, ignore_index)
    logits = at_least_fp32(logits)
    if ignore_index != NO_LABEL:
        # The gradient of a row of -inf would be 0 times NaN.
        logits = logits.masked_fill(ignored.unsqueeze(1), 0.0)
    logprobs = (logits if temperature == 1 else logits / temperature).log_softmax(dim=-1)
    return logprobs.gather(1, indices).squeeze(1).masked_fill(ignored, 0.0)


def sequence_logprobs(token_logprobs: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sums over each sequence, [N] -> [S], in fixed order."""
    lengths = cu_seqlens.long().diff()
    return torch.segment_reduce(at_least_fp32(token_logprobs), "sum", lengths=lengths, unsafe=True)
