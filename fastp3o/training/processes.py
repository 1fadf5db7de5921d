"""What one process decides for all."""

from collections.abc import Callable
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

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
