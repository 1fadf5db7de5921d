"""The head of a model, which turns hidden states into logits, and the dtypes of its matrix
products.

N tokens, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastp3o_kernels import onednn
from fastp3o_kernels.checks import (
    check_floating,
    check_labels,
    check_same_device,
    check_shape,
    check_tensors,
    check_whole,
)
from fastp3o_kernels.head.vocabulary_shard import VocabularyShard
from fastp3o_kernels.rows.rows import LogitsTransform


@dataclass(frozen=True, eq=False)
class Head(LogitsTransform):
    """logits = (softcap tanh((hidden weightᵀ + bias) / softcap)) / temperature, in fp32.

    Args:
        weight: [V, D] of a half, single or double floating dtype; may be tied to the embedding.
        bias: [V] of any floating dtype, or None.
        softcap: Gemma's cap on logits, applied before the temperature, or None.
        temperature: divides the logits.
        shard: if processes share the vocabulary: weight and bias are this one's part. Losses,
            log-probs and gradients of hidden states are those of the whole head on each; gradients
            of weight and bias are of its own rows.

    Raises:
        ValueError: for a soft cap or a temperature that is no finite number above 0.
    """

    weight: Tensor
    shard: VocabularyShard | None = None

    @classmethod
    def from_layer(cls, head: "HeadLike") -> "Head":
        """A linear layer, or a bare weight, is a head without soft cap, at temperature 1. A layer
        that has a group of its own of `fully_shard` is gathered. Raises ValueError for anything
        else, such as a layer with adapters, whose weight is not all that it multiplies by.
        """
        if isinstance(head, Head):
            return head
        if isinstance(head, nn.Linear):
            gather(head)
            return cls(head.weight, bias=head.bias)
        if isinstance(head, Tensor):
            return cls(head)
        raise ValueError(
            f"head must be a Head, a linear layer or a weight [V, D], got {type(head).__name__}: of a layer with "
            "adapters, pass a Head of the merged weight"
        )

    def detach(self) -> "Head":
        return replace(
            self,
            weight=self.weight.detach(),
            bias=None if self.bias is None else self.bias.detach(),
        )

    @property
    def widest(self) -> int:
        """Rows of weight, in the widest shard where there are several: their processes plan the
        same chunks.
        """
        return len(self.weight) if self.shard is None else self.shard.widest


HeadLike = Head | nn.Linear | Tensor


def gather(layer: nn.Module) -> None:
    """Makes the weights of a layer whole where `fully_shard` has put it in a group of its own,
    whose hooks wait for a call of the layer: losses never call it. The backward pass, or the
    layer's `reshard`, parts them again.
    """
    unshard = getattr(layer, "unshard", None)
    if unshard is not None:
        unshard()


def check_head(hidden: Tensor, head: Head, labels: Tensor, ignore_index: int | None) -> None:
    check_tensors(hidden=hidden, weight=head.weight, bias=head.bias, labels=labels)
    for name, tensor, shape in (("hidden", hidden, "[N, D]"), ("weight", head.weight, "[V, D]")):
        if tensor.dim() != 2:
            raise ValueError(f"{name} must have shape {shape}, got {list(tensor.shape)}")
        check_floating(name, tensor)
        check_whole(name, tensor)
    if head.shard is None:  # a part that is this process's own has its own gradient
        check_gradient_placements(head.weight)
    V, D = head.weight.shape
    if head.shard is not None and head.shard.rows != V:
        raise ValueError(f"weight must have the {head.shard.rows} rows of its shard, got {V}")
    if hidden.shape[1] != D:
        raise ValueError(
            f"hidden [N, D] and weight [V, D] must share D, got {list(hidden.shape)} and {[V, D]}"
        )
    # Autocast brings both to its own dtype, except fp64.
    dtypes = hidden.dtype, head.weight.dtype
    autocast = torch.is_autocast_enabled(hidden.device.type) and torch.float64 not in dtypes
    if hidden.dtype != head.weight.dtype and not autocast:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {head.weight.dtype}; they must be of one dtype"
        )
    if head.bias is not None:
        check_shape("bias", head.bias, (V,), "one entry for each row of weight")
        check_floating("bias", head.bias)
    check_same_device(hidden=hidden, weight=head.weight, labels=labels, bias=head.bias)
    V = V if head.shard is None else head.shard.vocabulary
    check_labels(labels, len(hidden), V, ignore_index, "one label for each row of hidden")


def check_gradient_placements(weight: Tensor) -> None:
    """Raises ValueError for a weight that full_tensor() made without grad_placements: in the
    backward pass each process would take the gradient of its own tokens for that of all.
    """
    node = weight.grad_fn
    while node is not None:
        if (
            node.name() == "_ToTorchTensorBackward"
            and getattr(node, "grad_placements", None) is None
        ):
            raise ValueError(
                "weight was gathered by full_tensor() without grad_placements, which would give it a wrong gradient: "
                "compute the loss within the model's forward call (`expose_head`), or pass "
                'grad_placements=[Partial("avg")] where processes have different tokens, [Replicate()] where all have '
                "the same"
            )
        inputs = node.next_functions
        node = inputs[0][0] if len(inputs) == 1 else None  # through casts and views


# Instructions for products, of x86 and of ARM64, where nothing was measured. With them products of
# bf16 take a quarter to a half of the time of fp32's, without them more.
INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "fp16_arith"),
}


def multiplies(half: torch.dtype) -> bool:
    """Whether this processor has instructions for products of a half-precision dtype, and PyTorch
    has the library.
    """
    found = torch.cpu.get_capabilities()
    return torch.backends.mkldnn.is_available() and any(
        found.get(name, False) for name in INSTRUCTIONS[half]
    )


class HeadDtypes(NamedTuple):
    """Operands in half precision (an autocast's too) are multiplied as they are by CUDA, with fp32
    results: logits are never rounded to half precision. Other devices have no such product:
    operands of logits are widened first, and those of gradients unless the processor multiplies
    bf16.
    """

    # Of hidden states and weight after rounding: autocast's dtype, or their own.
    rounded: torch.dtype
    multiplied: torch.dtype  # of the operands of the logits' product
    dlogits: torch.dtype  # of the gradients of logits, and of all operands of their products
    logits: torch.dtype  # of logits, log-probs and sums over tokens

    @classmethod
    def for_hidden(cls, hidden: Tensor) -> "HeadDtypes":
        """The dtypes for these hidden states under the autocast that is active now."""
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
        rounded = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        half = rounded in (torch.float16, torch.bfloat16)
        multiplied = torch.float32 if half and device != "cuda" else rounded
        bf16 = device == "cpu" and rounded == torch.bfloat16 and multiplies(rounded)
        return cls(
            rounded,
            multiplied,
            rounded if bf16 else multiplied,
            logits=torch.float32 if half else rounded,
        )

    def sum_bytes(self, head: Head) -> int:
        """Bytes that a weight's gradient takes beyond its own while it is summed over several
        products. A single one writes bf16 at once; fp16, which could overflow, is summed in fp32 in
        any case.
        """
        weight = head.weight
        if not (weight.requires_grad and self.writes_gradient(weight.dtype)):
            return 0
        return head.widest * weight.shape[1] * (self.logits.itemsize - weight.itemsize)

    def writes_gradient(self, dtype: torch.dtype) -> bool:
        """Whether a single product may write a weight's gradient in its dtype: its own sum is fp32
        inside.
        """
        return dtype == self.dlogits == torch.bfloat16

    def cast(self, operand: Tensor) -> Tensor:
        return operand.to(self.rounded).to(self.multiplied)


@contextmanager
def sums_in_fp32(device: torch.device) -> Iterator[None]:
    """Inside, cuBLAS adds the parts of a product that it divides along the sum in fp32. By default
    it may do so in the result's own half precision, which few rows and a sum over a vocabulary
    would lose digits by. Elsewhere nothing.
    """
    matmul, allowed = torch.backends.cuda.matmul, {}
    if device.type == "cuda":
        for half in ("bf16", "fp16"):
            name = f"allow_{half}_reduced_precision_reduction"
            allowed[name] = (getattr(matmul, name), getattr(matmul, f"{name}_split_k"))
            setattr(matmul, name, False)
    try:
        yield
    finally:
        for name, before in allowed.items():
            setattr(matmul, name, before)


def multiply(a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """out (+)= a @ b. On a GPU an fp32 result of operands in half precision is not rounded to their
    dtype before.
    """
    if out.dtype == a.dtype and onednn.is_chosen(a, b):
        onednn.multiply(a, b, out, accumulate=accumulate)
    elif out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    elif a.is_cuda and out.dtype == torch.float32:
        if accumulate:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        size = max(onednn.PART // out.shape[1], 1)
        for rows, part in zip(a.split(size), out.split(size), strict=True):
            product = torch.mm(rows, b)
            part.add_(product) if accumulate else part.copy_(product)
