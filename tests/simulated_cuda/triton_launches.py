"""Launches of Triton's kernels on the pretended device: they go to the interpreter."""

import inspect
from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

from tests.simulated_cuda.native import library
from tests.simulated_cuda.operations import execute
from tests.simulated_cuda.record import note_launch, note_variant, place
from tests.simulated_cuda.tensors import is_simulated


def install() -> None:
    launch = interpreter.GridExecutor.__call__

    def launch_on_device(executor: Any, *args: Any, **kwargs: Any) -> None:
        name = executor.fn.__name__
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not any(is_simulated(tensor) for tensor in tensors):
            return launch(executor, *args, **kwargs)
        device = torch.device("cuda", library().current_device())
        for tensor in tensors:
            if not is_simulated(tensor):
                raise ValueError(f"Pointer argument cannot be accessed from Triton (cpu tensor?): {name} at {place()}")
            if tensor.simulated_device != device:
                raise RuntimeError(
                    f"an illegal memory access was encountered: {name} at {place()} was launched on {device} and got a "
                    f"tensor on {tensor.simulated_device}"
                )
        note_launch(f"triton {name}")
        note_variant(name, variant(executor.fn, args, kwargs))

        def run(*args: Any, **kwargs: Any) -> None:
            launch(executor, *args, **kwargs)

        execute(run, args, kwargs, device, launched=True, written=tensors)

    interpreter.GridExecutor.__call__ = launch_on_device


def variant(kernel: Any, args: tuple, kwargs: dict) -> tuple:
    """What Triton's compiler would make a binary for: dtypes, alignment, constants, and integers that are 1 or
    multiples of 16 where the kernel does not say otherwise.
    """
    parameters = inspect.signature(kernel).parameters
    values = dict(zip(parameters, args, strict=False)) | kwargs
    return tuple((name, *kind(value, parameters.get(name))) for name, value in sorted(values.items()))


def kind(value: Any, parameter: inspect.Parameter | None) -> tuple:
    if isinstance(value, Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    constant = parameter is None or "constexpr" in str(parameter.annotation)
    if constant or not isinstance(value, int) or isinstance(value, bool):
        return (repr(value) if constant else type(value).__name__,)
    width = "i32" if -(2**31) <= value < 2**31 else "i64"
    return width, "1" if value == 1 else "16" if value % 16 == 0 else ""
