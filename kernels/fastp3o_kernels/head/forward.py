"""The head in pieces that fit a memory budget: hidden states -> log-probs. `head_gradients` is the way back.

N rows, D hidden size, V vocabulary, F = N V D. The logits cost one matrix product, 2 F operations.
"""

import torch
from torch import Tensor

from fastp3o_kernels.head.chunks import Chunks
from fastp3o_kernels.rows import in_torch as torch_rows
from fastp3o_kernels.rows.token_logprobs import launch_logprobs
from fastp3o_kernels.rows.transform import LogitsTransform, transform_


class Products:
    """Dtypes of the head's matrix products.

    Operands in half precision (an autocast's too) are multiplied as they are on a GPU, with fp32 results: logits are
    never rounded to half precision. A CPU widens the operands first.

    operands: what hidden and weight are rounded to. scratch: what is multiplied, and of the gradients of logits.
    logits: of logits, log-probs and sums.
    """

    def __init__(self, hidden: Tensor):
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
        self.operands = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        half = self.operands in (torch.float16, torch.bfloat16)
        self.scratch = torch.float32 if half and device == "cpu" else self.operands
        self.logits = torch.float32 if half else self.operands

    def operand(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.operands).to(self.scratch)


def multiply(a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """out (+)= a @ b. An fp32 result of operands in half precision is not rounded to theirs in between."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    elif a.is_cuda and out.dtype == torch.float32:
        if accumulate:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        out.copy_(torch.mm(a, b))


class ChunkedHead:
    """One evaluation of the head over N rows.

    logprobs, and with Triton row_max and log_sum: [N], filled in piece by piece. One buffer has the logits of the piece
    `resident`.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        transform: LogitsTransform,
        ignore_index: int,
        products: Products,
        chunks: Chunks,
        *,
        triton: bool,
    ):
        self.labels, self.transform, self.ignore_index = labels, transform, ignore_index
        self.products, self.chunks, self.triton = products, chunks, triton
        self.take(hidden, weight)
        self.vocabulary = len(weight)
        self.logits_buffer = hidden.new_empty(chunks.logits_rows, chunks.row_elements, dtype=products.logits)
        self.resident: slice | None = None
        self.logprobs, self.row_max, self.log_sum = hidden.new_empty(3, len(hidden), dtype=products.logits)

    def take(self, hidden: Tensor, weight: Tensor) -> None:
        self.hidden, self.weight = self.products.operand(hidden), self.products.operand(weight)

    def drop(self) -> None:
        """Gives up hidden states and weight until they are taken again, for autograd to keep them."""
        self.hidden = self.weight = None

    def logits(self, rows: slice) -> Tensor:
        """Logits of a piece [n, V]: the bare products where kernels transform them, else transformed."""
        logits = self.logits_buffer[: rows.stop - rows.start, : self.vocabulary]
        if rows != self.resident:
            multiply(self.hidden[rows], self.weight.T, out=logits)
            if not self.triton:
                transform_(logits, self.transform)
            self.resident = rows
        return logits

    def forward(self, rows: slice) -> None:
        """Fills in the log-probs of a piece."""
        logits, labels = self.logits(rows), self.labels[rows]
        if self.triton:
            results = launch_logprobs(logits, labels, self.transform, self.ignore_index)
            self.logprobs[rows], self.row_max[rows], self.log_sum[rows] = results
        else:
            self.logprobs[rows] = torch_rows.logprobs(logits, labels, self.ignore_index)
