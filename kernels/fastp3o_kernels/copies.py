"""Copies of what losses return, in memory and on disk."""

from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor

Output = TypeVar("Output", bound=type[tuple])


def copyable(output: Output) -> Output:
    """Of a named tuple: `copy.deepcopy` gives its values without their graph, and torch.load(weights_only=True) takes
    what torch.save wrote of it, once the package is imported.
    """
    output.__deepcopy__ = without_graph  # type: ignore[attr-defined]
    torch.serialization.add_safe_globals([output])
    return output


def without_graph(output: Any, memo: dict[int, Any]) -> Any:
    values = (value.detach() if isinstance(value, Tensor) else value for value in output)
    return type(output)(*(deepcopy(value, memo) for value in values))
