"""fp32 products of matrices by oneDNN, where it is measured to be faster than torch's own.

torch gives them to MKL, which computes without AVX-512 on an AMD processor; oneDNN, which torch has
for half precision, computes with it. That halves the time on Zen 5 and gains little on Zen 4, which
executes AVX-512 in two halves. So the three products of a head are timed with both when the first
one is due, once on each machine.

The two round differently: a choice that changed from one start to the next would move the last bits
of a run. So oneDNN must be faster by a margin that no noise reaches on processors that are known.
And where the margin might not do, the choice is kept in ~/.cache/fastp3o (or
$XDG_CACHE_HOME/fastp3o), by processor, number of threads and version of torch: the first process to
write decides for all others, later starts and resumed runs among them. Where nothing can be
written, the margin alone remains.
"""

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Multiplications of a product below which MKL is faster: oneDNN brings a weight into an order of
# its own first.
LEAST = 2_000_000
# Tokens below which it is for the gradient of a head's weight, both of whose operands are brought
# into order.
FEWEST = 32
# Elements of a part of a large result, and of what is copied for one.
PART = 2**17
# Rows of such a part at most, where it is of columns: longer ones would be too narrow. Rows at
# least of a transposed operand, which are copied for a part.
MOST_ROWS, LEAST_TURNED = 1024, 128

AVAILABLE = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
# Tokens, hidden size and vocabulary of the products that are timed, and how often: some 10 ms for
# each of the three.
TIMED, TURNS = (256, 256, 1024), 7
# oneDNN takes at most this part of MKL's time where it is taken.
MARGIN = 3 / 4


# --- which products are faster --------------------------------------------------------------------


class Faster(NamedTuple):
    """Whether oneDNN is the faster one for products: of rows with a weight's transpose, as logits
    and layers are computed; of rows with a weight, as their gradient; of transposed rows with rows,
    as the weight's gradient.
    """

    logits: bool = False
    dhidden: bool = False
    dweight: bool = False


# Of this process, once it is known.
chosen: Faster | None = None
choosing = Lock()


def choice() -> Faster:
    """Which products are oneDNN's on this machine. The first call may time them."""
    return chosen or first_choice()


def first_choice() -> Faster:
    global chosen
    with choosing:
        if chosen is None:
            chosen = kept_or_measured(kept_at()) if AVAILABLE else Faster()
        return chosen


def kept_at() -> Path:
    """The file of the choice for this processor, number of threads and version of torch."""
    features: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    machine = [
        platform.machine(),
        sorted(features.items()),
        torch.get_num_threads(),
        torch.__version__,
    ]
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(
        folder, "fastp3o", f"onednn-{sha256(json.dumps(machine).encode()).hexdigest()[:16]}.json"
    )


def kept_or_measured(path: Path) -> Faster:
    """The choice in the file. Without one it is measured and kept, unless another process has come
    first.
    """
    found = kept(path)
    if found is None:
        found = measured()
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and kept(path) is None:  # damaged
                path.unlink()
            with tempfile.NamedTemporaryFile("w", dir=path.parent) as whole:
                whole.write(json.dumps(found._asdict()))
                whole.flush()
                os.link(whole.name, path)  # fails where another one is
    return kept(path) or found


def kept(path: Path) -> Faster | None:
    try:
        return Faster(**{name: bool(value) for name, value in json.loads(path.read_text()).items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def measured() -> Faster:
    """Times the products in a thread of their own, where no autocast, inference mode or mode of a
    caller reaches.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(timed).result()


def timed() -> Faster:
    N, D, V = TIMED
    hidden, weight, dlogits = (
        torch.ones(shape, dtype=torch.float32) for shape in ((N, D), (V, D), (N, V))
    )
    return Faster(
        is_faster(hidden, weight.T), is_faster(dlogits, weight), is_faster(dlogits.T, hidden)
    )


def is_faster(a: Tensor, b: Tensor) -> bool:
    """Compares the shortest times of several turns: what else the machine does makes some longer,
    and none shorter.
    """
    out = torch.empty(len(a), b.shape[1], dtype=a.dtype)
    times = [
        (
            seconds(lambda: multiply(a, b, out, accumulate=False)),
            seconds(lambda: torch.mm(a, b, out=out)),
        )
        for _ in range(TURNS)
    ]
    onednn, mkl = (min(column) for column in zip(*times, strict=True))
    return onednn <= MARGIN * mkl


def seconds(compute: Callable[[], object]) -> float:
    begun = time.perf_counter()
    compute()
    return time.perf_counter() - begun


# --- products -------------------------------------------------------------------------------------


def takes(a: Tensor, columns: int) -> bool:
    """Whether the product of a [..., k] with [k, columns] may be for oneDNN: then `choice` has that
    of each form.
    """
    fp32 = (
        a.dtype == torch.float32 and a.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    )
    return fp32 and a.dim() > 1 and a.numel() * columns >= LEAST and any(choice())


def is_chosen(a: Tensor, b: Tensor) -> bool:
    """Whether the product of two matrices, each maybe transposed, is for oneDNN."""
    if not takes(a, b.shape[1]):
        return False
    if a.stride(0) < a.stride(1):
        return choice().dweight and a.shape[1] >= FEWEST
    return choice().logits if b.stride(0) < b.stride(1) else choice().dhidden


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b (+ bias), of fp32: [..., n, k], [k, m], [m] -> [..., n, m]. Not differentiable."""
    if torch.compiler.is_compiling():
        return opaque_product(a, b, bias)
    if not (b.is_contiguous() or b.T.is_contiguous()):
        b = b.contiguous()  # oneDNN's only way with others is thousands of times slower
    return torch.ops.mkldnn._linear_pointwise(a, b.T, bias, "none", [], "")


@torch.library.custom_op("fastp3o::onednn_product", mutates_args=())
def opaque_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """`product` in what is compiled: inductor's own form of it takes only weights that never
    change.
    """
    return product(a, b, bias)


@opaque_product.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[1])


def multiply(a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """out (+)= a @ b: [n, k], [k, m], [n, m]. It comes in parts of rows, or of columns where b has
    them in one piece: oneDNN returns new tensors, which should stay in the processor's cache.
    """
    if b.T.is_contiguous():
        for rows, result in zip(a.split(MOST_ROWS), out.split(MOST_ROWS), strict=True):
            size = max(PART // len(rows), 1)
            for columns, part in zip(b.split(size, 1), result.split(size, 1), strict=True):
                put(product(rows, columns), part, accumulate=accumulate)
        return
    turned = a.stride(0) < a.stride(1)
    size = (
        max(PART // max(a.shape[1], b.shape[1]), LEAST_TURNED)
        if turned
        else max(PART // out.shape[1], 1)
    )
    for rows, part in zip(a.split(size), out.split(size), strict=True):
        if turned:
            # oneDNN would pick the rows of a large matrix number by number, for as long as it then
            # multiplies.
            rows = rows.T.contiguous().T
        put(product(rows, b), part, accumulate=accumulate)


def put(result: Tensor, place: Tensor, *, accumulate: bool) -> None:
    place.add_(result) if accumulate else place.copy_(result)


# --- linear layers --------------------------------------------------------------------------------


class Linear(nn.Linear):
    """torch's, with oneDNN's products where they are faster."""

    def forward(self, input: Tensor) -> Tensor:
        if takes(input, self.out_features):
            if torch.is_grad_enabled():
                return LinearProduct.apply(input, self.weight, self.bias)
            if choice().logits:
                return product(input, self.weight.T, self.bias)
        return F.linear(input, self.weight, self.bias)


class LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return product(rows, weight.T, bias) if choice().logits else F.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        outputs, inputs, now = grad.flatten(0, -2), rows.flatten(0, -2), choice()
        drows = dweight = None
        if needs_rows:
            drows = (product if now.dhidden else torch.matmul)(grad, weight)
        if needs_weight:
            dweight = (product if now.dweight else torch.mm)(outputs.T, inputs)
        return drows, dweight, outputs.sum(0) if needs_bias else None


def use_onednn(model: nn.Module) -> None:
    """Lets the model's linear layers take oneDNN's products where they are faster."""
    if any(choice()):
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear
