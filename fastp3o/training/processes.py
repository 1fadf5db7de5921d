"""What one process decides for all, and what fails on one of them."""

from collections.abc import Callable
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

Result = TypeVar("Result")


def on_main_process(accelerator: Accelerator, compute: Callable[[], Result]) -> Result:
    """What `compute` returns on the main process, on every process. What it raises there is raised on all: none waits
    for one that has ended.
    """
    if accelerator.num_processes == 1:
        return compute()
    outcome: list = [None, None]
    if accelerator.is_main_process:
        try:
            outcome = [compute(), None]
        except Exception as error:
            outcome = [None, error]
    result, raised = broadcast_object_list(outcome)
    if raised is not None:
        raise raised
    return result


def on_every_process(accelerator: Accelerator, compute: Callable[[], Result]) -> Result:
    """What `compute` returns on this process, once it is done on all. What it raises on one is raised on all."""
    if accelerator.num_processes == 1:
        return compute()
    outcome: list = [None, None]
    try:
        outcome = [compute(), None]
    except Exception as error:
        outcome = [None, error]
    result, raised = outcome
    errors = [error for error in gather_object([raised]) if error is not None]
    if errors:
        raise raised or errors[0]
    return result
