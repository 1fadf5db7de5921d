"""The states of the random generators of a process, as JSON. The run's own choices depend on seed and step alone; a
reward function may draw from these.
"""

import random
from typing import Any

import numpy as np
import torch


def generator_states() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": as_text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        states["cuda"] = as_text(torch.cuda.get_rng_state())
    return states


def restore_generators(states: dict[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(as_bytes(states["torch"]))
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(as_bytes(states["cuda"]))


def as_text(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def as_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
