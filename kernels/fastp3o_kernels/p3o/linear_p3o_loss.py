"""Hidden states and a head -> P3O's loss and its gradients, never all logits at once.

N tokens, n tokens of a chunk, D hidden size, V vocabulary, F = N V D; P prompts with K responses
each: a pair in the paper, where K is 2. Sequence K p + k is response k of prompt p.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastp3o_kernels.checks import bounds_of_prompts, check_logprobs_out
from fastp3o_kernels.head import eager as head_eager
from fastp3o_kernels.head.chunked_loss import chunked_loss
from fastp3o_kernels.head.chunks import Chunk
from fastp3o_kernels.head.forward import ChunkedHead
from fastp3o_kernels.head.fsdp import reduced
from fastp3o_kernels.head.head import Head, HeadDtypes, HeadLike, check_head
from fastp3o_kernels.operation import HAS_TRITON, graph_break, use_triton
from fastp3o_kernels.p3o import eager
from fastp3o_kernels.p3o.losses import loss_output
from fastp3o_kernels.p3o.pairs import Pairs
from fastp3o_kernels.p3o.settings import (
    DEFAULTS,
    P3OLossOutput,
    P3OSettings,
    hints_at_settings,
)
from fastp3o_kernels.rows.rows import NO_LABEL

if HAS_TRITON:
    from fastp3o_kernels.p3o.pair_kernel import empty_terms, launch_coefficients, launch_results


class PairLoss:
    """P3O's coefficients, chunk by chunk, and its loss and metrics over all of them (`ChunkLoss`)."""

    outputs: Collection[str] = ()

    def __init__(self, pairs: Pairs, settings: P3OSettings):
        self.pairs, self.settings = pairs, settings
        # What each prompt adds, with Triton, filled in chunk by chunk.
        self.terms: Tensor | None = None
        # Without a gradient, of the last chunk and then of all.
        self.output: P3OLossOutput | None = None

    def evaluate(self, chunked: ChunkedHead, chunk: Chunk) -> None:
        """The loss needs all chunks at once: metrics are not sums over them."""

    def coefficients(self, chunked: ChunkedHead, chunk: Chunk) -> tuple[Tensor, None]:
        pairs = self.pairs.part(chunk.groups)
        if chunked.triton:
            if self.terms is None:
                self.terms = empty_terms(self.pairs)
            terms = self.terms[:, chunk.groups]
            return launch_coefficients(chunked.logprobs, pairs, self.settings, terms)[
                chunk.tokens
            ], None
        old, tokens = pairs.old_token_logprobs, chunk.tokens
        pairs = replace(
            pairs,
            cu_seqlens=pairs.cu_seqlens - tokens.start,
            old_token_logprobs=None if old is None else old[tokens],
        )
        with torch.enable_grad():
            logprobs = chunked.logprobs[tokens].detach().requires_grad_()
            output = eager.token_loss(logprobs, pairs, self.settings)
            (coefficients,) = torch.autograd.grad(output.loss, logprobs)
        self.output = output._replace(loss=output.loss.detach())
        return coefficients, None

    def total(self, chunked: ChunkedHead) -> Tensor:
        if chunked.triton:
            if self.terms is None:
                self.terms = empty_terms(self.pairs)
                launch_coefficients(chunked.logprobs, self.pairs, self.settings, self.terms)
            results = launch_results(self.terms, self.pairs, self.settings)
            self.output = loss_output(results[0].clone(), results)
        elif self.output is None or len(chunked.plan.chunks) > 1:
            self.output = eager.token_loss(chunked.logprobs, self.pairs, self.settings)
        return self.output.loss


@graph_break
@hints_at_settings
def linear_p3o_loss(
    hidden: Tensor,
    head: HeadLike,
    labels: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor,
    rewards: Tensor,
    settings: P3OSettings = DEFAULTS,
    *,
    old_token_logprobs: Tensor | None = None,
    valid_responses: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    divisor: float | Tensor | None = None,
    logprobs_out: Tensor | None = None,
    memory_budget: int | None = None,
    impl: str | None = None,
) -> P3OLossOutput:
    """P3O's loss from the hidden states that predict the tokens of the responses to P prompts.

    Only the gradients that are needed are computed, in the forward pass: a frozen head costs 4 F
    operations, frozen hidden states 4 F, both 2 F. Tokens of clipped pairs and of pairs of equal
    advantage take no part in the gradients' products on a CPU; on a GPU the host would have to wait
    for their number, and they are rows of zeros. The backward pass multiplies by the incoming
    gradient, which takes no time if it is 1, and can run once.

    Args:
        hidden: [N, D], the hidden states that predict the response tokens.
        head: Head with a weight [V, D], an `nn.Linear`, or the bare weight, as in
            `linear_logprobs`.
        labels: [N] int64 or int32, the response tokens, end-of-sequence included.
        cu_seqlens: [P K + 1] int32 or int64 on any device, or a list: where each response begins in
            [N]. It is needed on the host: a list or a tensor on the CPU spares waiting for the
            device. An empty response takes part in no pair.
        old_logprobs, ref_logprobs, rewards: as in `p3o_loss`.
        settings, valid_responses, sampler_logprobs: as in `p3o_loss`. Tokens of responses that are
            not valid have no gradient but take part in the logits' product, which empty responses
            do not.
        old_token_logprobs: [N], for clipping="token" and only there, as in `token_p3o_loss`.
        divisor: of the sum over prompts, or tokens with clipping="token", as in `token_p3o_loss`.
        logprobs_out: [N] floating point, which gets the tokens' log-probs; None: nothing does.
        memory_budget: bytes of scratch for logits and their gradient, as in `linear_logprobs`.
            Responses to a prompt whose logits it does not hold are computed in two passes: what
            fits is kept, the rest computed twice, with the same result.
        impl: None, "triton" or "eager", as in `linear_logprobs`.

    Returns:
        P3OLossOutput; the gradient reaches hidden states, weight and bias.

    Raises:
        ValueError: as in `linear_logprobs` and `p3o_loss`.
        RuntimeError: for a second backward pass.
    """
    head, cu_seqlens = Head.from_layer(head), torch.as_tensor(cu_seqlens)
    check_head(hidden, head, labels, ignore_index=None)
    head = reduced(head)
    pairs = Pairs(
        cu_seqlens,
        old_logprobs,
        ref_logprobs,
        rewards,
        old_token_logprobs,
        valid_responses,
        sampler_logprobs,
        divisor,
    ).checked("hidden", hidden, settings)
    check_logprobs_out(logprobs_out, hidden)
    triton = use_triton(impl, hidden, head.weight, head.bias, *pairs.floating.values())
    if impl == "eager" or len(hidden) == 0:
        rounded = HeadDtypes.for_hidden(hidden).rounded
        logprobs = head_eager.linear_outputs(hidden, head, labels, NO_LABEL, rounded).logprobs
        if logprobs_out is not None:
            logprobs_out.copy_(logprobs.detach())
        return eager.token_loss(logprobs, pairs, settings)
    bounds = bounds_of_prompts(cu_seqlens, len(hidden), rewards.shape[1])
    loss = PairLoss(pairs, settings)
    value = chunked_loss(
        hidden, head, labels, bounds, loss, memory_budget, triton=triton, logprobs_out=logprobs_out
    )
    assert loss.output is not None  # the loop asks for the total
    return loss.output._replace(loss=value)
