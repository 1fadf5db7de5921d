"""The meta device, which has no values: what runs there never makes the host wait for a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")


class NothingElsewhere(TorchDispatchMode):
    """Raises AssertionError for an operation on a tensor of the host, which a GPU would have to
    copy.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor) and tensor.dim() > 0 and tensor.numel():
                assert tensor.is_meta, f"{func} of a tensor on {tensor.device}"
        return result


@contextmanager
def on_meta_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched, torch.no_grad(), NothingElsewhere():
        # The device has no autocast.
        patched.setattr(torch, "is_autocast_enabled", lambda device: False)
        patched.setattr(torch, "autocast", lambda *_, **__: nullcontext())
        yield
