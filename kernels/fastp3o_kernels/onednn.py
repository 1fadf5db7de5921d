"""fp32 products of matrices by oneDNN, on the CPUs where torch's own are slow.

torch gives them to MKL, which computes without AVX-512 on an AMD processor. oneDNN, which torch has for half precision,
computes with it: benchmarks/README.md has the head's time beside torch's products.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Multiplications of a product below which MKL is faster: oneDNN brings a weight into an order of its own first.
LEAST = 2_000_000
# Elements of a part of a large result.
PART = 2**17


features: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
# Whether this is such a processor.
IS_FASTER = (
    str(features.get("cpu_name")).startswith("AMD")
    and features.get("avx512_f", False)
    and torch.backends.mkl.is_available()
    and torch.backends.mkldnn.is_available()
)


def takes(a: Tensor, columns: int) -> bool:
    """Whether the product of a [..., k] with [k, columns] is for oneDNN."""
    fp32 = a.dtype == torch.float32 and a.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return fp32 and a.dim() > 1 and a.numel() * columns >= LEAST and IS_FASTER


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b (+ bias), of fp32: [..., n, k], [k, m], [m] -> [..., n, m]. Not differentiable."""
    if torch.compiler.is_compiling():
        return opaque_product(a, b, bias)
    if not (b.is_contiguous() or b.T.is_contiguous()):
        b = b.contiguous()  # oneDNN's only way with others is thousands of times slower
    return torch.ops.mkldnn._linear_pointwise(a, b.T, bias, "none", [], "")


@torch.library.custom_op("fastp3o::onednn_product", mutates_args=())
def opaque_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """`product` in what is compiled: inductor's own form of it takes only weights that never change."""
    return product(a, b, bias)


@opaque_product.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[1])


def multiply(a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """out (+)= a @ b: [n, k], [k, m], [n, m]. It comes in parts of rows, or of columns where b has them in one piece:
    oneDNN returns new tensors, which should stay in the processor's cache.
    """
    columns = int(b.T.is_contiguous())
    size = max(PART // out.shape[1 - columns], 1)
    for part, operand in zip(out.split(size, columns), (a, b)[columns].split(size, columns), strict=True):
        result = product(a, operand) if columns else product(operand, b)
        part.add_(result) if accumulate else part.copy_(result)


class Linear(nn.Linear):
    """torch's, with oneDNN's products where they are faster."""

    def forward(self, input: Tensor) -> Tensor:
        if takes(input, self.out_features):
            if torch.is_grad_enabled():
                return LinearProduct.apply(input, self.weight, self.bias)
            return product(input, self.weight.T, self.bias)
        return F.linear(input, self.weight, self.bias)


class LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return product(rows, weight.T, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        outputs, inputs = grad.flatten(0, -2), rows.flatten(0, -2)
        dweight = None
        if needs_weight:
            # oneDNN copies its first operand where that is transposed: the narrower one.
            narrow = outputs.shape[1] <= inputs.shape[1]
            dweight = product(outputs.T, inputs) if narrow else product(inputs.T, outputs).T
        return product(grad, weight) if needs_rows else None, dweight, outputs.sum(0) if needs_bias else None


def use_onednn(model: nn.Module) -> None:
    """Lets the model's linear layers take oneDNN's products where they are faster."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
