"""Lower bounds of what is measured, timed in turns with it: the bare matrix products, the bare
copy.
"""

from collections.abc import Callable

import torch

from benchmarks.inputs import Inputs

BareOperation = Callable[[], object]


def products(inputs: Inputs, *, logits: int, dhidden: int, dweight: int) -> BareOperation:
    """This many products of the head's shapes, in the inputs' dtype with results in theirs."""
    return linear_products(inputs.hidden, inputs.weight, logits, dhidden, dweight)


def linear_products(
    hidden: torch.Tensor, weight: torch.Tensor, logits: int, dhidden: int, dweight: int
) -> BareOperation:
    """The same of any linear layer. hidden: [N, D]. weight: [V, D]."""
    hidden, weight = hidden.detach(), weight.detach()
    out = hidden.new_empty(len(hidden), len(weight))
    dhidden_out, dweight_out = torch.empty_like(hidden), torch.empty_like(weight)
    torch.mm(hidden, weight.T, out=out)

    def run() -> None:
        for _ in range(logits):
            torch.mm(hidden, weight.T, out=out)
        for _ in range(dhidden):
            torch.mm(out, weight, out=dhidden_out)
        for _ in range(dweight):
            torch.mm(out.T, hidden, out=dweight_out)

    return run


def copy(source: torch.Tensor, target: torch.Tensor) -> BareOperation:
    """Each byte of the source read and written once."""
    return lambda: target.copy_(source)
