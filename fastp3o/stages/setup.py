"""What every stage does before its loop: accelerator, seed, data."""

from collections.abc import Callable

from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from fastp3o.config import StageConfig
from fastp3o.data import DataReport
from fastp3o.precision import Precision


def make_accelerator(config: StageConfig, precision: Precision) -> Accelerator:
    """An Accelerator with the stage's precision and trackers; the seed of all libraries is set."""
    set_seed(config.seed)
    disable_progress_bar()  # of loading and saving weights, which would break up the run's own
    return Accelerator(
        mixed_precision="no" if precision.autocast is None else "bf16",
        log_with=None if config.report_to == "none" else config.report_to.split(","),
        project_dir=config.output_dir,
    )


def check_divisible(accelerator: Accelerator, total: int, name: str) -> None:
    """Raises ValueError where `total` does not divide evenly among the processes."""
    processes = accelerator.num_processes
    if total % processes:
        raise ValueError(f"--{name} ({total}) must be a multiple of the number of processes ({processes})")


def load_data(
    accelerator: Accelerator,
    loader: Callable[..., tuple[Dataset, DataReport]],
    train_source: str,
    eval_source: str | None,
    tokenizer: PreTrainedTokenizerBase,
    config: StageConfig,
    **lengths: int,
) -> tuple[Dataset, Dataset | None]:
    """Training and evaluation data, the same on every process.

    Raises ValueError where there are fewer evaluation examples than processes.
    """

    def load(source: str, split: str, limit: int | None) -> Dataset:
        examples, report = loader(
            source,
            tokenizer,
            split=split,
            limit=limit,
            max_prompt_tokens=config.max_prompt_tokens,
            skip_bad_records=config.skip_bad_records,
            **lengths,
        )
        accelerator.print(f"{source}: {report}")
        if len(examples) < accelerator.num_processes:
            raise ValueError(f"{source} has {len(examples)} usable examples, fewer than there are processes")
        return examples

    train = load(train_source, config.split, config.limit)
    return train, load(eval_source, config.eval_split, config.eval_limit) if eval_source else None
