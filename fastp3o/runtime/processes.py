"""Shares results, errors, sums and folders among the processes."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from fastp3o.files import make_unfinished, move_into_place, naming

Result = TypeVar("Result")


def on_main_process(accelerator: Accelerator, compute: Callable[[], Result]) -> Result:
    """Calls `compute` on the main process and returns its result on every process. An error there
    is raised on all, so that none waits for a process that has ended.
    """
    if accelerator.num_processes == 1:
        return compute()
    outcome = result_or_error(compute) if accelerator.is_main_process else (None, None)
    result, error = broadcast_object_list(list(outcome))
    if error is not None:
        raise error
    return result


def on_every_process(accelerator: Accelerator, compute: Callable[[], Result]) -> Result:
    """Returns this process's result, once all have theirs. An error on one is raised on all."""
    if accelerator.num_processes == 1:
        return compute()
    result, error = result_or_error(compute)
    errors = [error for error in gather_object([error]) if error is not None]
    if errors:
        raise error or errors[0]
    return result  # type: ignore[return-value]


def result_or_error(compute: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return compute(), None
    except Exception as error:
        return None, error


@contextmanager
def whole_folder(accelerator: Accelerator, folder: Path) -> Iterator[Path]:
    """A folder under a temporary name, which all processes may write to. It takes its place, where
    it may replace another, once the block has ended without an error on the main process.
    """
    unfinished = on_main_process(accelerator, lambda: make_unfinished(folder))
    try:
        with naming(folder):
            yield unfinished
        on_main_process(accelerator, lambda: move_into_place(unfinished, folder))
    except BaseException:
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def sum_over_processes(accelerator: Accelerator, values: Tensor) -> Tensor:
    return values if accelerator.num_processes == 1 else accelerator.reduce(values, reduction="sum")
