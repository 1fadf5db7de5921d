"""The chunked head's backward pass: dL/d(log-prob) of each token -> gradients of hidden states, weight and bias.

Gradients of logits wait in a buffer for their products until it is full, longer than the one for logits: the weight's
gradient is read and written once for each filling, and small chunks would spend their time on that. Tokens whose
coefficient is zero (clipped pairs, pairs of equal advantage, ignored labels) are left out of the products.

N tokens, n tokens of a span, k tokens of a filling, D hidden size, V vocabulary, F = N V D. Each gradient costs 2 F
operations.
"""

import torch
from torch import Tensor

from fastp3o_kernels.dispatch import HAS_TRITON
from fastp3o_kernels.head.dtypes import multiply
from fastp3o_kernels.head.forward import ChunkedHead
from fastp3o_kernels.head.gradient_scaling import scaled
from fastp3o_kernels.head.head import Head
from fastp3o_kernels.head.waiting_tokens import Moves, WaitingTokens
from fastp3o_kernels.rows import in_torch

if HAS_TRITON:
    from fastp3o_kernels.rows.logits_kernel import launch_dlogits
    from fastp3o_kernels.rows.on_policy_kernel import launch_on_policy
    from fastp3o_kernels.rows.statistics_kernel import launch_entropy_dlogits


class HeadGradients:
    """Gradients of one evaluation of the head, while it holds hidden states and head.

    hidden, head: the caller's, of which only the dtypes and shapes count here.
    needs: whether hidden, weight and bias get a gradient.
    """

    def __init__(self, chunked: ChunkedHead, hidden: Tensor, head: Head, needs: tuple[bool, bool, bool]):
        self.chunked, self.finished = chunked, False
        plan = chunked.plan
        self.triton, self.logits_dtype = chunked.triton, plan.dtypes.logits
        self.waiting = WaitingTokens()
        self.dtypes = [tensor.dtype if tensor is not None else None for tensor in (hidden, head.weight, head.bias)]
        needs_hidden, self.needs_weight, needs_bias = needs
        self.dlogits_buffer = hidden.new_empty(plan.dlogits_rows, plan.row_elements, dtype=plan.dtypes.multiplied)
        self.dhidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if needs_hidden else None
        self.dweight: Tensor | None = None
        self.dbias = hidden.new_zeros(plan.V, dtype=self.logits_dtype) if needs_bias else None

    def backward(self, span: slice, coefficients: Tensor, entropy_coefficients: Tensor | None = None) -> None:
        """Adds a span through which `forward` has gone, with dL/d(log-prob) of its tokens [n], and dL/d(entropy) where
        that counts.
        """
        chunked, of_entropy = self.chunked, entropy_coefficients
        counts = coefficients != 0 if of_entropy is None else (coefficients != 0) | (of_entropy != 0)
        out = self.room_for(span, counts)
        transform = chunked.head, chunked.ignore_index
        if not self.triton:
            given = chunked.logits(span), chunked.labels[span], coefficients
            in_torch.dlogits(*given, *transform, out=out, entropy_coefficients=of_entropy)
            return
        rows = chunked.logits(span), chunked.labels[span], chunked.row_max[span], chunked.log_sum[span]
        if of_entropy is None:
            launch_dlogits(*rows, coefficients, None, *transform, out=out)
        else:
            launch_entropy_dlogits(*rows, chunked.entropy[span], coefficients, of_entropy, *transform, out=out)

    def on_policy(self, span: slice, coefficients: Tensor) -> None:
        """Forward and backward of a span at once."""
        chunked = self.chunked
        if not self.triton:
            chunked.forward(span)
            self.backward(span, coefficients)
            return
        out = self.room_for(span, coefficients != 0)
        launch_on_policy(chunked.logits(span), chunked.labels[span], coefficients, None, chunked.head, out=out)

    def room_for(self, span: slice, counts: Tensor) -> Tensor:
        """The part of the buffer for the gradient of a span's logits, [n, V]. counts: [n] bool, which are not zero."""
        if self.waiting.number + span.stop - span.start > len(self.dlogits_buffer):
            self.multiply_waiting(last=False)
        begin = self.waiting.number
        self.waiting.add(span, counts)
        return self.dlogits_buffer[begin : self.waiting.number, : self.chunked.plan.V]

    def multiply_waiting(self, *, last: bool) -> None:
        """The gradients' products over all tokens that wait and have a coefficient."""
        tokens, moves = self.waiting.release()
        if len(tokens) == 0:
            return
        dlogits = self.compact(moves, len(tokens))
        # Neighbours are read and written in place.
        adjacent = bool((tokens.diff() == 1).all())
        index = slice(int(tokens[0]), int(tokens[-1]) + 1) if adjacent else tokens.to(dlogits.device)
        if self.dhidden is not None:
            self.write_dhidden(self.dhidden, dlogits, index)
        if self.needs_weight:
            self.add_to_dweight(dlogits, self.chunked.hidden[index], last=last)
        if self.dbias is not None:
            self.dbias += dlogits.sum(dim=0, dtype=self.dbias.dtype)

    def compact(self, moves: Moves, k: int) -> Tensor:
        """Moves rows of the buffer; its first k, [k, V]."""
        buffer = self.dlogits_buffer
        for source, target in moves:
            buffer[target.to(buffer.device)] = buffer[source.to(buffer.device)]
        return buffer[:k, : self.chunked.plan.V]

    def write_dhidden(self, dhidden: Tensor, dlogits: Tensor, index: slice | Tensor) -> None:
        if isinstance(index, slice):
            multiply(dlogits, self.chunked.weight, out=dhidden[index])
        else:
            product = dhidden.new_empty(len(dlogits), dhidden.shape[1])
            multiply(dlogits, self.chunked.weight, out=product)
            dhidden[index] = product

    def add_to_dweight(self, dlogits: Tensor, hidden: Tensor, *, last: bool) -> None:
        first = self.dweight is None
        if self.dweight is None:
            dtype = self.dweight_dtype(only=last)
            self.dweight = torch.empty_like(self.chunked.weight, dtype=dtype, memory_format=torch.contiguous_format)
        multiply(dlogits.T, hidden, out=self.dweight, accumulate=not first)

    def dweight_dtype(self, *, only: bool) -> torch.dtype:
        """fp32 where several fillings of the buffer are summed; a single product's own sum is fp32 inside already."""
        bf16 = self.dtypes[1] == self.chunked.plan.dtypes.multiplied == torch.bfloat16
        return torch.bfloat16 if only and bf16 else self.logits_dtype

    def rescale(self, scale: Tensor) -> None:
        """Multiplies all gradients so far, those of logits that wait too, by a 0-d tensor."""
        waiting = self.dlogits_buffer[: self.waiting.number]
        for gradient in (waiting, self.dhidden, self.dweight, self.dbias):
            if gradient is not None:
                scaled(gradient, scale, gradient.dtype, triton=self.triton)

    def finish(self) -> None:
        """The last products; the buffers and all that only they need are given up."""
        if self.finished:
            return
        self.multiply_waiting(last=True)
        if self.needs_weight and self.dweight is None:
            self.dweight = torch.zeros_like(self.chunked.weight, memory_format=torch.contiguous_format)
        del self.chunked, self.dlogits_buffer
        self.finished = True

    def results(self, scale: Tensor | None = None) -> list[Tensor | None]:
        """Gradients of hidden [N, D], weight [V, D] and bias [V] in their dtypes, None where not needed.

        scale: 0-d, what they are multiplied by; None: as they are.
        """
        self.finish()
        return [
            None if gradient is None or dtype is None else scaled(gradient, scale, dtype, triton=self.triton)
            for gradient, dtype in zip((self.dhidden, self.dweight, self.dbias), self.dtypes, strict=True)
        ]
