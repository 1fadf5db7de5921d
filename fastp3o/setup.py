"""What every stage does before its loop: accelerator, seed, precision."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from fastp3o.config import StageConfig


def make_accelerator(config: StageConfig) -> Accelerator:
    """An Accelerator with the stage's precision and trackers; the seed of all libraries is set."""
    set_seed(config.seed)
    return Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" or prefers_bf16(config.precision) else "no",
        log_with=None if config.report_to == "none" else config.report_to.split(","),
        project_dir=config.output_dir,
    )


def start_trackers(accelerator: Accelerator, config: StageConfig) -> None:
    plain = {name: value for name, value in vars(config).items() if isinstance(value, int | float | str | bool)}
    accelerator.init_trackers("trackers", config=plain)


def prefers_bf16(precision: str) -> bool:
    return precision == "auto" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def share(accelerator: Accelerator, total: int, name: str) -> int:
    """The part of `total` that falls to one process. Raises ValueError where it does not divide evenly."""
    processes = accelerator.num_processes
    if total % processes:
        raise ValueError(f"--{name} ({total}) must be a multiple of the number of processes ({processes})")
    return total // processes
