"""Launches of Triton's kernels on the pretended device: they go to the interpreter."""

from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

from tests.simulated_cuda.host import note_launch, place
from tests.simulated_cuda.native import library
from tests.simulated_cuda.operations import execute
from tests.simulated_cuda.tensors import is_simulated


def install() -> None:
    launch = interpreter.GridExecutor.__call__

    def launch_on_device(executor: Any, *args: Any, **kwargs: Any) -> None:
        name = executor.fn.__name__
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not any(map(is_simulated, tensors)):
            return launch(executor, *args, **kwargs)
        device = torch.device("cuda", library().current_device())
        for found in {
            tensor.simulated_device if is_simulated(tensor) else "cpu" for tensor in tensors
        } - {device}:
            raise RuntimeError(
                f"an illegal memory access was encountered: {name} at {place()} was launched on {device} and got a "
                f"tensor on {found}"
            )
        note_launch(f"triton {name}")

        def run(*args: Any, **kwargs: Any) -> None:
            launch(executor, *args, **kwargs)

        execute(run, args, kwargs, device, launched=True, written=tensors)

    interpreter.GridExecutor.__call__ = launch_on_device
