"""Tensors on a pretended device: their values lie in CPU memory, and every operation on them is the
device's.
"""

from typing import Any

import torch
from torch import Tensor


class SimulatedTensor(Tensor):
    """A tensor on cuda:0 or cuda:1."""

    simulated_device: torch.device

    @staticmethod
    def __new__(
        cls, values: Tensor, device: torch.device, requires_grad: bool = False
    ) -> "SimulatedTensor":
        tensor = torch.Tensor._make_subclass(
            cls, values, requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        tensor.simulated_device = device
        return tensor

    # operations.py; it is called here where no mode is active, as in threads of other libraries.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        from tests.simulated_cuda.operations import run_operation

        return run_operation(function, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SimulatedTensor({list(self.shape)}, {self.dtype}, {self.simulated_device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "SimulatedTensor":
        if id(self) not in memo:
            with torch.no_grad():
                copy = on_device(values_in(self).clone(), self.simulated_device).requires_grad_(
                    self.requires_grad
                )
            if getattr(self, "_is_param", False):
                copy._is_param = True
            memo[id(self)] = copy
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")


def is_simulated(value: Any) -> bool:
    return isinstance(value, SimulatedTensor)


def values_in(tensor: Tensor) -> Tensor:
    """A CPU tensor of the same memory; one on the CPU is given back as it is."""
    if not is_simulated(tensor):
        return tensor
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():
        values = torch.empty(0, dtype=tensor.dtype)
        values.set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        return values.conj() if tensor.is_conj() else values


def on_device(values: Tensor, device: torch.device) -> SimulatedTensor:
    """A tensor on the device of the same memory."""
    with torch.inference_mode(False):
        return SimulatedTensor(values.detach().clone() if values.is_inference() else values, device)
