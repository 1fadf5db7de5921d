"""Hidden states, a head and an objective -> the loss and its gradients, never all logits at once.

Where the coefficient dL/d log π of a token depends on its own group alone (a prompt's responses; a chosen and a
rejected; one response), a chunk of whole groups goes all the way, hidden states -> logits -> log-probs -> objective ->
coefficients -> gradients, before the next: three matrix products in all, where a loss that needs every log-prob first
computes the logits twice. The objective is plain PyTorch over the n log-probs of a chunk.

N tokens, D hidden size, V vocabulary, F = N V D; P groups with K responses each.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastp3o_kernels.checks import bounds_of_prompts, check_divisor, checked_cu_seqlens
from fastp3o_kernels.copies import copyable
from fastp3o_kernels.dispatch import use_triton
from fastp3o_kernels.first_derivatives import first_derivatives_only
from fastp3o_kernels.head import eager
from fastp3o_kernels.head.backward import HeadGradients
from fastp3o_kernels.head.chunks import plan_chunks
from fastp3o_kernels.head.dtypes import HeadDtypes
from fastp3o_kernels.head.forward import ChunkedHead
from fastp3o_kernels.head.fp16_scale import fp16_scale
from fastp3o_kernels.head.groups import Groups, GroupTensors
from fastp3o_kernels.head.head import Head, check_head
from fastp3o_kernels.rows.labels import NO_LABEL
from fastp3o_kernels.rows.statistics import TokenOutputs, asked_for, check_outputs
from fastp3o_kernels.uncompiled import uncompiled

Metrics = dict[str, Tensor]
Objective = Callable[[Groups], Tensor | tuple[Tensor, Metrics]]


@copyable
class LinearLossOutput(NamedTuple):
    """loss: 0-d, differentiable. metrics: what the objective gave beside it, detached 0-d sums over all groups."""

    loss: Tensor
    metrics: Metrics


class Evaluation:
    """An objective's sums over the chunks of one pass.

    bounds: where the groups begin and the last one ends, [P + 1]. cu_seqlens: the same of responses, on the device.
    """

    def __init__(
        self,
        objective: Objective,
        bounds: list[int],
        cu_seqlens: Tensor,
        responses_per_group: int,
        tensors: GroupTensors,
    ):
        self.objective, self.bounds, self.cu_seqlens, self.tensors = objective, bounds, cu_seqlens, tensors
        self.responses_per_group = responses_per_group
        self.loss: Tensor | None = None
        self.metrics: Metrics = {}

    def tokens(self, groups: slice) -> slice:
        return slice(self.bounds[groups.start], self.bounds[groups.stop])

    def add(self, tokens: TokenOutputs, groups: slice) -> Tensor:
        """The objective of some neighbouring groups, differentiable where their tokens' [n] log-probs and entropies
        are.
        """
        K, own = self.responses_per_group, self.tokens(groups)
        cu_seqlens = self.cu_seqlens[K * groups.start : K * groups.stop + 1] - own.start
        value = self.objective(Groups(tokens[0], cu_seqlens, K, self.tensors.part(groups, own), *tokens[1:]))
        loss, metrics = value if isinstance(value, tuple) else (value, {})
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"the objective must return the sum over its groups as a 0-d tensor, got {got}")
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()
        for name, metric in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + metric.detach()
        return loss

    def coefficients(self, tokens: TokenOutputs, groups: slice) -> tuple[Tensor, Tensor | None]:
        """Adds the objective of some groups; its derivatives by their tokens' log-probs and entropies, [n]."""
        with torch.enable_grad():
            logprobs = tokens.logprobs.detach().requires_grad_()
            entropy = None if tokens.entropy is None else tokens.entropy.detach().requires_grad_()
            loss = self.add(tokens._replace(logprobs=logprobs, entropy=entropy), groups)
            wanted = [logprobs] if entropy is None else [logprobs, entropy]
            if not loss.requires_grad:  # a constant
                gradients = tuple(torch.zeros_like(tensor) for tensor in wanted)
            else:
                gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        return gradients[0], None if entropy is None else gradients[1]


class LinearLoss(torch.autograd.Function):
    """Forward 2 F operations, and 2 F for each gradient; backward multiplies them by the incoming gradient.

    weight, bias: the head's own, which autograd sees only as arguments.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, head, evaluation, outputs, divisor, plan, triton):
        needs = ctx.needs_input_grad[:3]
        chunked = ChunkedHead(labels, NO_LABEL, plan, triton=triton, statistics=bool(outputs))
        with chunked.holding(hidden, head):
            gradients = HeadGradients(chunked, hidden, head, needs) if any(needs) else None
            scale = fp16_scale(gradients, plan.dtypes.multiplied, hidden.device)
            for chunk in plan.chunks:
                for span in chunk.spans:
                    chunked.forward(span)
                tokens = outputs_of(chunked, evaluation.tokens(chunk.units), outputs)
                if gradients is None:
                    evaluation.add(tokens, chunk.units)
                    continue
                first = evaluation.tokens(chunk.units).start
                of_logprobs, of_entropy = evaluation.coefficients(tokens, chunk.units)
                factor = 1 / divisor if scale is None else scale.lowered_for(of_logprobs, of_entropy)
                of_logprobs = of_logprobs * factor
                of_entropy = None if of_entropy is None else of_entropy * factor
                # The last span's logits are still in their buffer.
                for span in reversed(chunk.spans):
                    own = slice(span.start - first, span.stop - first)
                    gradients.backward(span, of_logprobs[own], None if of_entropy is None else of_entropy[own])
            if gradients is not None:
                gradients.finish()
        ctx.gradients = gradients
        # By how much more than the loss the gradients are.
        ctx.scale = 1.0 if scale is None else scale.value * divisor
        return hidden.new_zeros((), dtype=plan.dtypes.logits) if evaluation.loss is None else evaluation.loss / divisor

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad_loss):
        if ctx.gradients is None:
            raise RuntimeError("the gradients were handed out by the first backward pass; call the loss again")
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.results(grad_loss / ctx.scale), *[None] * 7


def outputs_of(chunked: ChunkedHead, tokens: slice, outputs: Collection[str]) -> TokenOutputs:
    return TokenOutputs(chunked.logprobs[tokens], **{name: getattr(chunked, name)[tokens] for name in outputs})


@uncompiled
def linear_loss(
    hidden: Tensor,
    head: Head | Tensor,
    labels: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    objective: Objective,
    *,
    responses_per_group: int = 1,
    of_tokens: Mapping[str, Tensor] | None = None,
    of_responses: Mapping[str, Tensor] | None = None,
    of_groups: Mapping[str, Tensor] | None = None,
    outputs: Collection[str] = (),
    divisor: float | Tensor | None = None,
    memory_budget: int | None = None,
    impl: str | None = None,
) -> LinearLossOutput:
    """Any objective of groups of responses, from the hidden states that predict their tokens.

    The objective is called once for each chunk of whole groups, with `Groups` of their token log-probs and of the
    tensors below. It returns the sum of its loss over these groups, and may return a dictionary of further sums beside
    it. Its derivative by the log-probs comes from autograd over n numbers. DPO, for one:

        def dpo(pairs):  # column 0 is the chosen response
            log_ratios = pairs.logprobs - pairs["reference"]
            return -logsigmoid(0.1 * (log_ratios[:, 0] - log_ratios[:, 1])).sum()

        linear_loss(hidden, head, labels, cu_seqlens, dpo, responses_per_group=2, of_responses={"reference": reference})

    What needs numbers from the whole batch (KTO's z0, a whitened advantage) is computed before, without gradients, and
    handed in as one of the tensors.

    As with `linear_p3o_loss`, only the gradients that are needed are computed, in the forward pass; tokens without a
    coefficient take no part in their products; the backward pass can run once.

    Args:
        hidden: [N, D], the hidden states that predict the response tokens.
        head: Head with a weight [V, D], or the bare weight, as in `linear_logprobs`.
        labels: [N] int64 or int32, the response tokens.
        cu_seqlens: [P K + 1] int32 or int64 on any device, or a list: where each response begins in [N]; a list or a
            tensor on the CPU spares waiting for the device. Responses may be empty, and P may be 0: the gradient is
            then zero.
        responses_per_group: K. Response k of group p is sequence K p + k.
        of_tokens: tensors [N, ...] by name, such as old log-probs. of_responses: [P, K, ...]. of_groups: [P, ...]. They
            are constants, even where they require gradients.
        outputs: of "entropy" (differentiable), "mean_logit" and "is_top", what `Groups` has of each token beside its
            log-prob, as in `linear_logprobs`.
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
    K = responses_per_group
    cu_seqlens = checked_cu_seqlens(cu_seqlens, len(hidden), responses_per_prompt=K)
    bounds = bounds_of_prompts(cu_seqlens, len(hidden), K)
    P = len(bounds) - 1
    tensors = GroupTensors.checked(len(hidden), P, K, of_tokens, of_responses, of_groups, hidden=hidden)
    on_device = cu_seqlens.to(hidden.device, torch.int64, non_blocking=True)
    evaluation = Evaluation(objective, bounds, on_device, K, tensors)
    dtypes = HeadDtypes.for_hidden(hidden)
    triton = use_triton(impl, hidden, head.weight, head.bias)
    divisor = max(P, 1) if divisor is None else divisor
    check_divisor(divisor)
    if isinstance(divisor, Tensor):
        divisor = divisor.detach().to(hidden.device, dtypes.logits, non_blocking=True)
    if impl == "eager":
        tokens = asked_for(outputs, *eager.linear_outputs(hidden, head, labels, NO_LABEL, dtypes.rounded))
        # Through the sum gradients, if only zeros, reach all that the log-probs come from.
        nothing = 0 * tokens.logprobs.sum()
        loss = evaluation.add(tokens, slice(0, P)) + nothing if P else nothing
        return LinearLossOutput(loss / divisor, evaluation.metrics)
    if not torch.is_grad_enabled():
        hidden, head = hidden.detach(), head.detach()
    plan = plan_chunks(bounds, len(head.weight), dtypes, memory_budget)
    given = hidden, head.weight, head.bias, labels.contiguous(), head
    loss = LinearLoss.apply(*given, evaluation, tuple(outputs), divisor, plan, triton)
    return LinearLossOutput(loss, evaluation.metrics)
