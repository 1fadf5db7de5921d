"""fastp3o, eager PyTorch and torch.compile at both levels: hidden states or logits -> P3O's loss.

The others' log-probs, here and in `peers.py`, go through the same arithmetic of P3O.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.inputs import Inputs
from fastp3o_kernels import (
    linear_logprobs,
    linear_p3o_loss,
    logits_p3o_loss,
    onednn,
    token_p3o_loss,
)


def p3o_of(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """Sequence sums and P3O's loss from token log-probs [N], in eager PyTorch."""
    old, ref, rewards = (tensor.to(logprobs.dtype) for tensor in inputs.pairs)
    return token_p3o_loss(logprobs, inputs.cu_seqlens, old, ref, rewards, impl="eager").loss


def eager_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)


def eager_head(hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    return eager_logprobs(hidden @ weight.T, labels)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile at its best: anew for each vocabulary, which it then knows, but not for each
    number of tokens.
    """
    for_any_number = torch.compile(function, dynamic=False)

    def run(inputs: Tensor, labels: Tensor, *others: Tensor) -> Tensor:
        for tensor in (inputs, labels):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return for_any_number(inputs, labels, *others)

    return run


compiled_logprobs, compiled_head = compiled(eager_logprobs), compiled(eager_head)


def logits_fastp3o(logits: Tensor, inputs: Inputs) -> Tensor:
    return logits_p3o_loss(
        logits, inputs.labels, inputs.cu_seqlens, *inputs.pairs, inplace_backward=True
    ).loss


def logits_eager(logits: Tensor, inputs: Inputs) -> Tensor:
    return p3o_of(eager_logprobs(logits, inputs.labels), inputs)


def logits_compiled(logits: Tensor, inputs: Inputs) -> Tensor:
    return p3o_of(compiled_logprobs(logits, inputs.labels), inputs)


def hidden_fastp3o(inputs: Inputs, memory_budget: int | None = None) -> Tensor:
    given = inputs.labels, inputs.host_cu_seqlens, *inputs.pairs
    return linear_p3o_loss(inputs.hidden, inputs.weight, *given, memory_budget=memory_budget).loss


def hidden_fastp3o_by_torch(inputs: Inputs) -> Tensor:
    """The same with torch's products, where fastp3o may have chosen oneDNN's."""
    chosen = onednn.choice()
    onednn.chosen = onednn.Faster()
    try:
        return hidden_fastp3o(inputs)
    finally:
        onednn.chosen = chosen


def hidden_fastp3o_logprobs(inputs: Inputs) -> Tensor:
    """`linear_logprobs` under another loss: what DPO, GRPO and the rest would call."""
    return p3o_of(linear_logprobs(inputs.hidden, inputs.weight, inputs.labels), inputs)


def hidden_eager(inputs: Inputs) -> Tensor:
    return p3o_of(eager_head(inputs.hidden, inputs.labels, inputs.weight), inputs)


def hidden_compiled(inputs: Inputs) -> Tensor:
    return p3o_of(compiled_head(inputs.hidden, inputs.labels, inputs.weight), inputs)
