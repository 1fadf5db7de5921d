"""Hidden states, a head and any objective of groups of responses -> the loss and its gradients,
chunk by chunk.

The objective is plain PyTorch over the n log-probs of a chunk; autograd over these gives its
coefficients.

N tokens, D hidden size, V vocabulary; P groups with K responses each.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastp3o_kernels.checks import (
    bounds_of_prompts,
    check_divisor,
    check_logprobs_out,
    check_positive_whole_number,
    check_same_device,
    check_sum,
    checked_cu_seqlens,
    debugging,
)
from fastp3o_kernels.head import eager
from fastp3o_kernels.head.chunked_loss import chunked_loss
from fastp3o_kernels.head.chunks import Chunk
from fastp3o_kernels.head.forward import ChunkedHead
from fastp3o_kernels.head.fsdp import reduced
from fastp3o_kernels.head.head import Head, HeadDtypes, HeadLike, check_head
from fastp3o_kernels.operation import graph_break, on_device, use_triton
from fastp3o_kernels.rows.eager import sequence_logprobs
from fastp3o_kernels.rows.logprobs import TokenOutputs, check_outputs, token_outputs
from fastp3o_kernels.rows.rows import NO_LABEL

# --- what an objective reads and returns ----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Groups:
    """Token log-probs, differentiable, and the caller's tensors of the same groups.

    token_logprobs: [n] fp32 or fp64. cu_seqlens: [P K + 1] int64, where each response begins in
    [n]. entropy, mean_logit, is_top: [n], where they were asked for; the first is differentiable
    (`TokenOutputs`).
    """

    token_logprobs: Tensor
    cu_seqlens: Tensor
    responses_per_group: int
    tensors: Mapping[str, Tensor]
    entropy: Tensor | None = None
    mean_logit: Tensor | None = None
    is_top: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        """One of the caller's tensors: [n, ...], [P, K, ...] or [P, ...], as it was given. Raises
        KeyError, which says which ones there are, if there is none of this name.
        """
        if name not in self.tensors:
            there = ", ".join(sorted(self.tensors)) or "none"
            raise KeyError(
                f"no tensor {name!r} among token_tensors, response_tensors and group_tensors; given: {there}"
            )
        return self.tensors[name]

    def having(self, **tensors: Tensor) -> "Groups":
        """The same groups with further tensors by name."""
        return replace(self, tensors={**self.tensors, **tensors})

    @cached_property
    def lengths(self) -> Tensor:
        """[P, K] int64: tokens of each response."""
        return self.cu_seqlens.diff().view(-1, self.responses_per_group)

    @cached_property
    def logprobs(self) -> Tensor:
        """[P, K]: log-probabilities of whole responses."""
        return self.sums(self.token_logprobs)

    def sums(self, values: Tensor) -> Tensor:
        """[n] -> [P, K], over the tokens of each response."""
        return sequence_logprobs(values, self.cu_seqlens).view(-1, self.responses_per_group)

    def means(self, values: Tensor) -> Tensor:
        """[n] -> [P, K]; 0 for a response without tokens."""
        return self.sums(values) / self.lengths.clamp(min=1)

    def per_token(self, values: Tensor) -> Tensor:
        """[P, K] -> [n]: each token gets its response's value."""
        return values.flatten().repeat_interleave(
            self.lengths.flatten(), output_size=len(self.token_logprobs)
        )


Metrics = dict[str, Tensor]
Objective = Callable[[Groups], Tensor | tuple[Tensor, Metrics]]


class LinearLossOutput(NamedTuple):
    """loss: 0-d, differentiable. metrics: the objective's further sums over all groups, detached,
    0-d.
    """

    loss: Tensor
    metrics: Metrics


# --- sums over chunks -----------------------------------------------------------------------------


@dataclass
class ObjectiveSums:
    """An objective's sums over the chunks of one pass (`ChunkLoss`)."""

    objective: Objective
    cu_seqlens: Tensor  # [P K + 1] int64 on the device
    responses_per_group: int
    token_tensors: Metrics  # [N, ...]
    group_tensors: Metrics  # [P, ...]
    outputs: Collection[str]  # statistics that the objective sees
    divisor: float | Tensor  # of its sum
    sum: Tensor | None = None
    metrics: Metrics = field(default_factory=dict)

    def add(self, values: TokenOutputs, groups: slice, tokens: slice) -> Tensor:
        """The objective of neighboring groups, differentiable where their tokens' [n] log-probs and
        entropies are.
        """
        loss, metrics = self.called(values, groups, tokens)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(
                f"the objective must return the sum over its groups as a 0-d tensor, got {got}"
            )
        if values[0].requires_grad and not loss.requires_grad:
            raise ValueError(
                "the objective's result has no gradient: it is detached, or a constant of the log-probs, and nothing "
                "would be learned. Where nothing takes part, return 0 times the sum of groups.token_logprobs"
            )
        if self.sum is None and debugging():
            self.check_additive(loss.detach(), values, groups, tokens)
        self.sum = loss.detach() if self.sum is None else self.sum + loss.detach()
        for name, metric in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + metric.detach()
        return loss

    def called(self, values: TokenOutputs, groups: slice, tokens: slice) -> tuple[Tensor, Metrics]:
        """The objective's result with these groups."""
        K = self.responses_per_group
        cu_seqlens = self.cu_seqlens[K * groups.start : K * groups.stop + 1] - tokens.start
        tensors = {name: tensor[tokens] for name, tensor in self.token_tensors.items()}
        tensors |= {name: tensor[groups] for name, tensor in self.group_tensors.items()}
        value = self.objective(Groups(values[0], cu_seqlens, K, tensors, *values[1:]))
        return value if isinstance(value, tuple) else (value, {})

    @torch.no_grad()
    def check_additive(
        self, together: Tensor, values: TokenOutputs, groups: slice, tokens: slice
    ) -> None:
        """Calls the objective with the first group and with the others. Raises ValueError if its
        results do not add up to that of all.
        """
        if groups.stop - groups.start < 2 or not together.isfinite():
            return
        second = int(self.cu_seqlens[self.responses_per_group * (groups.start + 1)])
        alone = []
        for part, of_part in (
            (slice(groups.start, groups.start + 1), slice(tokens.start, second)),
            (slice(groups.start + 1, groups.stop), slice(second, tokens.stop)),
        ):
            own = slice(of_part.start - tokens.start, of_part.stop - tokens.start)
            of_tokens: list[Any] = [None if value is None else value[own] for value in values]
            alone.append(self.called(TokenOutputs(*of_tokens), part, of_part)[0])
        check_sum("the objective's result", together, torch.stack(alone))

    def token_values(self, chunked: ChunkedHead, chunk: Chunk) -> TokenOutputs:
        statistics = [values[chunk.tokens] for values in chunked.statistics]
        return token_outputs(self.outputs, chunked.logprobs[chunk.tokens], *statistics)

    def evaluate(self, chunked: ChunkedHead, chunk: Chunk) -> None:
        self.add(self.token_values(chunked, chunk), chunk.groups, chunk.tokens)

    def coefficients(self, chunked: ChunkedHead, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """Adds the objective of a chunk; its derivatives by the tokens' log-probs and entropies,
        [n].
        """
        values = self.token_values(chunked, chunk)
        with torch.enable_grad():
            logprobs = values.logprobs.detach().requires_grad_()
            entropy = None if values.entropy is None else values.entropy.detach().requires_grad_()
            loss = self.add(
                values._replace(logprobs=logprobs, entropy=entropy), chunk.groups, chunk.tokens
            )
            wanted = [logprobs] if entropy is None else [logprobs, entropy]
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        factor = 1 / self.divisor
        return gradients[0] * factor, None if entropy is None else gradients[1] * factor

    def total(self, chunked: ChunkedHead) -> Tensor:
        return chunked.logprobs.new_zeros(()) if self.sum is None else self.sum / self.divisor


# --- the loss -------------------------------------------------------------------------------------


def checked_tensors(
    hidden: Tensor, tensors: Mapping[str, Tensor], shape: tuple[int, ...], why: str
) -> Metrics:
    """The caller's tensors by name, as constants. Raises ValueError for what is no tensor, another
    shape, or another device than hidden's.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{name} must be a tensor that begins with {list(shape)} ({why}), got {tensor!r:.80}"
            )
        if tensor.shape[: len(shape)] != shape:
            raise ValueError(
                f"{name} must begin with {list(shape)} ({why}), got {list(tensor.shape)}"
            )
        check_same_device(hidden=hidden, **{name: tensor})
    return {name: tensor.detach() for name, tensor in tensors.items()}


def check_names(**tensors: Mapping[str, Tensor] | None) -> None:
    """Raises ValueError for a name in two of the arguments: an objective would see one of them."""
    taken: dict[str, str] = {}
    for argument, given in tensors.items():
        for name in given or {}:
            if name in taken:
                raise ValueError(f"{name!r} is in {taken[name]} and in {argument}")
            taken[name] = argument


@graph_break
def linear_loss(
    hidden: Tensor,
    head: HeadLike,
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
    logprobs_out: Tensor | None = None,
    memory_budget: int | None = None,
    impl: str | None = None,
) -> LinearLossOutput:
    """Any objective of groups of responses, from the hidden states that predict their tokens.

    The objective is called once for each chunk of whole groups, with `Groups` of their token
    log-probs and of the tensors below. It returns the sum of its loss over these groups, not a
    mean, and may return a dictionary of further sums as well. With FASTP3O_DEBUG=1 in the
    environment, it is called with parts of the first chunk, too, and must be their sum. DPO, for
    one:

        def dpo(pairs):  # column 0 is the chosen response
            log_ratios = pairs.logprobs - pairs["ref"]
            return -logsigmoid(0.1 * (log_ratios[:, 0] - log_ratios[:, 1])).sum()

        linear_loss(hidden, head, labels, cu_seqlens, dpo, responses_per_group=2,
        response_tensors={"ref": ref})

    Numbers of the whole batch that an objective needs (KTO's z0, a whitened advantage) are computed
    before, without gradients, and given as one of the tensors.

    As with `linear_p3o_loss`, only the gradients that are needed are computed, in the forward pass;
    on a CPU tokens without a coefficient take no part in their products; the backward pass can run
    once.

    Args:
        hidden: [N, D], the hidden states that predict the response tokens.
        head: Head with a weight [V, D], an `nn.Linear`, or the bare weight, as in
            `linear_logprobs`.
        labels: [N] int64 or int32, the response tokens alone, without any to be ignored
            (`response_tokens`).
        cu_seqlens: [P K + 1] int32 or int64 on any device, or a list: where each response begins in
            [N]; a list or a tensor on the CPU spares waiting for the device. Responses may be
            empty, and P may be 0: the gradient is then zero.
        responses_per_group: K. Response k of group p is sequence K p + k.
        token_tensors, response_tensors, group_tensors: the objective's further tensors by name: [N,
            ...] such as old log-probs, [P, K, ...] and [P, ...]. They are constants, even where
            they require gradients.
        outputs: what `Groups` has of each token next to its log-prob: any of "entropy"
            (differentiable), "mean_logit" and "is_top", as in `linear_logprobs`.
        divisor: what the sum over all groups is divided by, P by default. For accumulation and
            several processes: the number of groups, or of tokens, in the whole batch.
        logprobs_out: [N] floating point, which gets the tokens' log-probs; None: nothing does.
        memory_budget: bytes of scratch for logits and their gradient, as in `linear_logprobs`.
        impl: None, "triton" or "eager", as in `linear_logprobs`. The objective is PyTorch in any
            case.

    Returns:
        LinearLossOutput(loss, metrics); the gradient reaches hidden states, weight and bias.

    Raises:
        ValueError: as in `linear_logprobs`; for tensors of other shapes, and two of one name; where
            the objective gives no 0-d tensor, or one without a gradient while gradients are wanted.
        RuntimeError: for a second backward pass.
    """
    head = Head.from_layer(head)
    check_head(hidden, head, labels, ignore_index=None)
    head = reduced(head)
    check_outputs(outputs)
    check_positive_whole_number("responses_per_group", responses_per_group)
    K, N = responses_per_group, len(hidden)
    cu_seqlens = checked_cu_seqlens(cu_seqlens, hidden, responses_per_prompt=K)
    bounds = bounds_of_prompts(cu_seqlens, N, K)
    P = len(bounds) - 1
    check_names(
        token_tensors=token_tensors, response_tensors=response_tensors, group_tensors=group_tensors
    )
    tokens, responses, groups = (
        checked_tensors(hidden, tensors or {}, shape, why)
        for tensors, shape, why in (
            (token_tensors, (N,), "a row for each token"),
            (
                response_tensors,
                (P, K),
                f"a row for each group and an entry for each response, with responses_per_group={K}",
            ),
            (group_tensors, (P,), "a row for each group"),
        )
    )
    check_logprobs_out(logprobs_out, hidden)
    dtypes = HeadDtypes.for_hidden(hidden)
    triton = use_triton(impl, hidden, head.weight, head.bias)
    divisor = max(P, 1) if divisor is None else divisor
    check_divisor(divisor)
    if isinstance(divisor, Tensor):
        divisor = on_device(divisor.detach(), hidden.device, dtypes.logits)
    offsets = on_device(cu_seqlens, hidden.device, torch.int64)
    sums = ObjectiveSums(objective, offsets, K, tokens, responses | groups, tuple(outputs), divisor)
    if impl == "eager":
        values = eager.linear_outputs(hidden, head, labels, NO_LABEL, dtypes.rounded, outputs)
        if logprobs_out is not None:
            logprobs_out.copy_(values.logprobs.detach())
        # Through the sum gradients, if only zeros, reach all that the log-probs come from.
        nothing = 0 * values.logprobs.sum()
        loss = (sums.add(values, slice(0, P), slice(0, N)) + nothing if P else nothing) / divisor
    else:
        loss = chunked_loss(
            hidden,
            head,
            labels,
            bounds,
            sums,
            memory_budget,
            triton=triton,
            logprobs_out=logprobs_out,
        )
    return LinearLossOutput(loss, sums.metrics)
