"""What every stage does before its loop: accelerator, seed, data."""

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import InitProcessGroupKwargs, parse_flag_from_env, set_seed
from datasets import Dataset
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from fastp3o.config import StageConfig
from fastp3o.data import DataReport
from fastp3o.models.packed_model import PackedModel
from fastp3o.precision import Precision

Loader = Callable[..., tuple[Dataset, DataReport]]

# One process loads, saves or asks a judge while the others wait, far beyond NCCL's ten minutes.
LONGEST_WAIT = timedelta(hours=12)


class Setting(NamedTuple):
    """What a stage works with beside its data. model: the one that learns. mesh: None for a single process."""

    accelerator: Accelerator
    precision: Precision
    tokenizer: PreTrainedTokenizerBase
    model: PackedModel
    mesh: DeviceMesh | None


def make_accelerator(config: StageConfig, precision: Precision) -> Accelerator:
    """An Accelerator with the stage's precision and trackers; the seed of all libraries is set. Raises ValueError as
    `new_accelerator`.
    """
    return new_accelerator(config.seed, precision, log_with=trackers(config.report_to), project_dir=config.output_dir)


def new_accelerator(seed: int, precision: Precision, **trackers: Any) -> Accelerator:
    """trackers: accelerate's own arguments. Raises ValueError where its configuration would spread the model over the
    processes itself.
    """
    for engine in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if parse_flag_from_env(f"ACCELERATE_USE_{engine}"):
            raise ValueError(
                f"accelerate's configuration asks for {engine}, and fastp3o shards models itself: start with torchrun, "
                "or with accelerate launch --multi_gpu and a configuration without it"
            )
    set_seed(seed)
    quiet_libraries()
    return Accelerator(
        mixed_precision="no" if precision.autocast is None else "bf16",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=LONGEST_WAIT)],
        **trackers,
    )


def trackers(names: str) -> list[str] | None:
    """accelerate's trackers. Raises ValueError for one that is not there: accelerate would leave it out."""
    if names == "none":
        return None
    chosen = [name.strip() for name in names.split(",")]
    available = [tracker.value for tracker in get_available_trackers()]
    if missing := [name for name in chosen if name not in available]:
        raise ValueError(
            f"--report_to: {', '.join(missing)} is not installed or not a tracker of accelerate's; "
            f"there are {', '.join([*available, 'none'])}"
        )
    return chosen


def quiet_libraries() -> None:
    """Leaves out what would break up the run's own lines: progress bars of loading and saving, and a note on each saved
    state that tied weights are in it once, as they should be: loading ties them again.
    """
    disable_progress_bar()
    logging.getLogger("accelerate.utils.other").addFilter(not_on_tied_weights)


def not_on_tied_weights(record: logging.LogRecord) -> bool:
    return "Removed shared tensor" not in record.getMessage()


def check_divisible(accelerator: Accelerator, total: int, name: str) -> None:
    """Raises ValueError where `total` does not divide evenly among the processes."""
    processes = accelerator.num_processes
    if total % processes:
        raise ValueError(f"--{name} ({total}) must be a multiple of the number of processes ({processes})")


def load_data(
    accelerator: Accelerator,
    loader: Loader,
    train_source: str,
    eval_source: str | None,
    tokenizer: PreTrainedTokenizerBase,
    config: StageConfig,
    eval_loader: Loader | None = None,
    **lengths: int,
) -> tuple[Dataset, Dataset | None]:
    """Training and evaluation data, the same on every process. eval_loader: of the latter, where it is another.

    Raises ValueError where there are fewer evaluation examples than processes.
    """

    def load(loader: Loader, source: str, split: str, limit: int | None) -> Dataset:
        return load_examples(accelerator, loader, source, split, limit, tokenizer, config, **lengths)

    train = load(loader, train_source, config.split, config.limit)
    if not eval_source:
        return train, None
    return train, load(eval_loader or loader, eval_source, config.eval_split, config.eval_limit)


def load_examples(
    accelerator: Accelerator,
    loader: Loader,
    source: str,
    split: str,
    limit: int | None,
    tokenizer: PreTrainedTokenizerBase,
    config: StageConfig,
    **lengths: int,
) -> Dataset:
    """A data set, the same on every process. Raises ValueError where it has fewer examples than there are processes."""
    examples, report = loader(
        source,
        tokenizer,
        split=split,
        limit=limit,
        max_prompt_tokens=config.max_prompt_tokens,
        max_characters=config.max_characters,
        skip_bad_records=config.skip_bad_records,
        **lengths,
    )
    accelerator.print(f"{source}: {report}")
    if len(examples) < accelerator.num_processes:
        raise ValueError(f"{source} has {len(examples)} usable examples, fewer than there are processes")
    return examples
