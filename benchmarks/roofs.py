"""What no implementation can beat: the bare matrix products, the bare copy. Measured beside each of them."""

from collections.abc import Callable

import torch

from benchmarks.inputs import Inputs

Roof = Callable[[], object]


def products(inputs: Inputs, *, logits: int, dhidden: int, dweight: int) -> Roof:
    """So many products of the head's shapes, in the inputs' dtype with results in theirs."""
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    out = hidden.new_empty(len(hidden), len(weight))
    of_hidden, of_weight = torch.empty_like(hidden), torch.empty_like(weight)
    torch.mm(hidden, weight.T, out=out)

    def run() -> None:
        for _ in range(logits):
            torch.mm(hidden, weight.T, out=out)
        for _ in range(dhidden):
            torch.mm(out, weight, out=of_hidden)
        for _ in range(dweight):
            torch.mm(out.T, hidden, out=of_weight)

    return run


def copy(source: torch.Tensor, target: torch.Tensor) -> Roof:
    """Each byte of the source read and written once."""
    return lambda: target.copy_(source)
