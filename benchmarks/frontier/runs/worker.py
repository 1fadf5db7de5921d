"""How a worker process of the comparison begins."""

import multiprocessing
import os
from threading import Thread

import torch


def begin_worker() -> None:
    """Gives torch one thread, and ends the worker with the command that started it, however that ends.

    A worker that outlived its command would go on with its run next to those of the next command, and a trainer takes
    a signal as a request to save.
    """
    torch.set_num_threads(1)
    command = multiprocessing.parent_process()

    def end_with_command() -> None:
        command.join()
        os._exit(1)

    Thread(target=end_with_command, daemon=True).start()
