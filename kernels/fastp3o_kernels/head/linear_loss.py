"""Hidden states, a head and any objective of groups of responses -> the loss and its gradients, chunk by chunk.

The objective is plain PyTorch over the n log-probs of a chunk; autograd over these gives its coefficients.

N tokens, D hidden size, V vocabulary; P groups with K responses each.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastp3o_kernels.checks import bounds_of_prompts, check_divisor, checked_cu_seqlens
from fastp3o_kernels.head import oracle
from fastp3o_kernels.head.chunked_loss import chunked_loss
from fastp3o_kernels.head.chunks import Chunk
from fastp3o_kernels.head.forward import ChunkedHead
from fastp3o_kernels.head.groups import Groups, GroupTensors
from fastp3o_kernels.head.head import Head, HeadDtypes, check_head
from fastp3o_kernels.operation import copyable, graph_break, on_device, use_triton
from fastp3o_kernels.rows.rows import NO_LABEL
from fastp3o_kernels.rows.token_logprobs import TokenOutputs, check_outputs, token_outputs

Metrics = dict[str, Tensor]
Objective = Callable[[Groups], Tensor | tuple[Tensor, Metrics]]


@copyable
class LinearLossOutput(NamedTuple):
    """loss: 0-d, differentiable. metrics: the objective's further sums over all groups, detached, 0-d."""

    loss: Tensor
    metrics: Metrics


class ObjectiveSums:
    """An objective's sums over the chunks of one pass (`ChunkLoss`).

    cu_seqlens: [P K + 1] int64 on the device. outputs: statistics that the objective sees. divisor: of its sum.
    """

    def __init__(
        self,
        objective: Objective,
        cu_seqlens: Tensor,
        responses_per_group: int,
        tensors: GroupTensors,
        outputs: Collection[str],
        divisor: float | Tensor,
    ):
        self.objective, self.cu_seqlens, self.tensors = objective, cu_seqlens, tensors
        self.responses_per_group, self.divisor = responses_per_group, divisor
        self.outputs, self.statistics = outputs, bool(outputs)
        self.sum: Tensor | None = None
        self.metrics: Metrics = {}

    def add(self, found: TokenOutputs, groups: slice, tokens: slice) -> Tensor:
        """The objective of neighbouring groups, differentiable where their tokens' [n] log-probs and entropies are."""
        K = self.responses_per_group
        cu_seqlens = self.cu_seqlens[K * groups.start : K * groups.stop + 1] - tokens.start
        value = self.objective(Groups(found[0], cu_seqlens, K, self.tensors.part(groups, tokens), *found[1:]))
        loss, metrics = value if isinstance(value, tuple) else (value, {})
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"the objective must return the sum over its groups as a 0-d tensor, got {got}")
        self.sum = loss.detach() if self.sum is None else self.sum + loss.detach()
        for name, metric in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + metric.detach()
        return loss

    def found(self, chunked: ChunkedHead, chunk: Chunk) -> TokenOutputs:
        statistics = [values[chunk.tokens] for values in chunked.statistics]
        return token_outputs(self.outputs, chunked.logprobs[chunk.tokens], *statistics)

    def evaluate(self, chunked: ChunkedHead, chunk: Chunk) -> None:
        self.add(self.found(chunked, chunk), chunk.groups, chunk.tokens)

    def coefficients(self, chunked: ChunkedHead, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """Adds the objective of a chunk; its derivatives by the tokens' log-probs and entropies, [n]."""
        found = self.found(chunked, chunk)
        with torch.enable_grad():
            logprobs = found.logprobs.detach().requires_grad_()
            entropy = None if found.entropy is None else found.entropy.detach().requires_grad_()
            loss = self.add(found._replace(logprobs=logprobs, entropy=entropy), chunk.groups, chunk.tokens)
            wanted = [logprobs] if entropy is None else [logprobs, entropy]
            if not loss.requires_grad:  # a constant
                gradients = tuple(torch.zeros_like(tensor) for tensor in wanted)
            else:
                gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        factor = 1 / self.divisor
        return gradients[0] * factor, None if entropy is None else gradients[1] * factor

    def total(self, chunked: ChunkedHead) -> Tensor:
        return chunked.logprobs.new_zeros(()) if self.sum is None else self.sum / self.divisor


@graph_break
def linear_loss(
    hidden: Tensor,
    head: Head | Tensor,
    labels: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    objective: Objective,
    *,
    responses_per_group: int = 1,
    token_tensors: Mapping[str, Tensor] | None = None,
    response_tensors: Mapping[str, Tensor] | None = None,
    group_tensors: Mapping[str, Tensor] | None = None,
    outputs: Collection[str] = (),
    divisor: float | Tensor | None = None,
    memory_budget: int | None = None,
    impl: str | None = None,
) -> LinearLossOutput:
    """Any objective of groups of responses, from the hidden states that predict their tokens.

    The objective is called once for each chunk of whole groups, with `Groups` of their token log-probs and of the
    tensors below. It returns the sum of its loss over these groups, and may return a dictionary of further sums as
    well. DPO, for one:

        def dpo(pairs):  # column 0 is the chosen response
            log_ratios = pairs.logprobs - pairs["ref"]
            return -logsigmoid(0.1 * (log_ratios[:, 0] - log_ratios[:, 1])).sum()

        linear_loss(hidden, head, labels, cu_seqlens, dpo, responses_per_group=2, response_tensors={"ref": ref})

    Numbers of the whole batch that an objective needs (KTO's z0, a whitened advantage) are computed before, without
    gradients, and given as one of the tensors.

    As with `linear_p3o_loss`, only the gradients that are needed are computed, in the forward pass; on a CPU tokens
    without a coefficient take no part in their products; the backward pass can run once.

    Args:
        hidden: [N, D], the hidden states that predict the response tokens.
        head: Head with a weight [V, D], or the bare weight, as in `linear_logprobs`.
        labels: [N] int64 or int32, the response tokens.
        cu_seqlens: [P K + 1] int32 or int64 on any device, or a list: where each response begins in [N]; a list or a
            tensor on the CPU spares waiting for the device. Responses may be empty, and P may be 0: the gradient is
            then zero.
        responses_per_group: K. Response k of group p is sequence K p + k.
        token_tensors, response_tensors, group_tensors: the objective's further tensors by name: [N, ...] such as old
            log-probs, [P, K, ...] and [P, ...]. They are constants, even where they require gradients.
        outputs: what `Groups` has of each token next to its log-prob: any of "entropy" (differentiable), "mean_logit"
            and "is_top", as in `linear_logprobs`.
        divisor: what the sum over all groups is divided by, P by default. For accumulation and several processes: the
            number of groups, or of tokens, in the whole batch.
        memory_budget: bytes of scratch for logits and their gradient, as in `linear_logprobs`.
        impl: None, "triton" or "eager", as in `linear_logprobs`. The objective is PyTorch in any case.

    Returns:
        LinearLossOutput(loss, metrics); the gradient reaches hidden states, weight and bias.

    Raises:
        ValueError: as in `linear_logprobs`; for tensors of other shapes; where the objective gives no 0-d tensor.
        RuntimeError: for a second backward pass.
    """
    head = Head.from_weight(head)
    check_head(hidden, head, labels, ignore_index=None)
    check_outputs(outputs)
    K, N = responses_per_group, len(hidden)
    cu_seqlens = checked_cu_seqlens(cu_seqlens, hidden, responses_per_prompt=K)
    bounds = bounds_of_prompts(cu_seqlens, N, K)
    P = len(bounds) - 1
    given = token_tensors or {}, response_tensors or {}, group_tensors or {}
    tensors = GroupTensors.checked(hidden, P, K, *given)
    dtypes = HeadDtypes.for_hidden(hidden)
    triton = use_triton(impl, hidden, head.weight, head.bias)
    divisor = max(P, 1) if divisor is None else divisor
    check_divisor(divisor)
    if isinstance(divisor, Tensor):
        divisor = on_device(divisor.detach(), hidden.device, dtypes.logits)
    offsets = on_device(cu_seqlens, hidden.device, torch.int64)
    sums = ObjectiveSums(objective, offsets, K, tensors, tuple(outputs), divisor)
    if impl == "eager":
        found = oracle.linear_outputs(hidden, head, labels, NO_LABEL, dtypes.rounded, outputs)
        # Through the sum gradients, if only zeros, reach all that the log-probs come from.
        nothing = 0 * found.logprobs.sum()
        loss = (sums.add(found, slice(0, P), slice(0, N)) + nothing if P else nothing) / divisor
    else:
        loss = chunked_loss(hidden, head, labels, bounds, sums, memory_budget, triton=triton)
    return LinearLossOutput(loss, sums.metrics)
