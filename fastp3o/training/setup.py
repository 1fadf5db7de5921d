"""Prepares every stage: processes, seed, data."""

import logging
import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import InitProcessGroupKwargs, LoggerType, parse_flag_from_env, set_seed
from datasets import Dataset, concatenate_datasets
from transformers.utils.logging import disable_progress_bar

from fastp3o.config import DataConfig, StageConfig
from fastp3o.data.loading import DataReport
from fastp3o.errors import UserError
from fastp3o.models.attention import choose_attention
from fastp3o.models.packable import trial_overflow
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import process_mesh
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.run.checkpoint import newest_first
from fastp3o.run.folder import check_output_dir
from fastp3o.run.hub import require_repository
from fastp3o.run.manifest import first_start
from fastp3o.run.names import STATES
from fastp3o.runtime.context import Caller, Context
from fastp3o.runtime.precision import Precision, choose_precision, wider_precision
from fastp3o.runtime.processes import on_main_process
from fastp3o.sources import InMemory, Source

Loader = Callable[..., tuple[Dataset, DataReport]]

# One process loads, saves or asks a judge while the others wait, far longer than NCCL's ten
# minutes; see `HangWatch`.
LONGEST_WAIT = timedelta(hours=12)


def make_context(
    config: StageConfig, automatic: str, caller: Caller | None, **divisible: int
) -> Context:
    """Joins the processes, seeds all libraries, checks the run's folder and loads the tokenizer.

    automatic: the precision that "auto" stands for on a GPU. divisible: multiples of the number of
    processes, by flag.

    Raises ValueError if one is not, if the configuration is not complete, and as
    `make_accelerator`, `check_output_dir` and `load_tokenizer` do.
    """
    config.check_complete()
    precision, trackers = choose_precision(config.precision, automatic), trackers_of(config)
    available = [tracker.value for tracker in get_available_trackers()]
    # accelerate would leave out a tracker that it does not have.
    if absent := [name for name in trackers if name not in available and name in LoggerType.list()]:
        raise UserError(f"--report_to: {absent[0]} is not installed: pip install {absent[0]}")
    if missing := [name for name in trackers if name not in available]:
        raise UserError(
            f"unknown tracker {', '.join(missing)} in --report_to; available: {', '.join([*available, 'none'])}"
        )
    accelerator = make_accelerator(
        config.seed, precision, log_with=trackers or None, project_dir=str(config.folder)
    )
    choose_attention(config.attention, accelerator.device)
    if config.deterministic and accelerator.device.type == "cuda":
        # cuBLAS reads it at its first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # a pass over every buffer
        cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False
    processes = accelerator.num_processes
    for flag, total in divisible.items():
        if total % processes:
            raise UserError(
                f"--{flag} ({total}) must be a multiple of the number of processes ({processes})"
            )
    check_output_dir(accelerator, config)
    on_main_process(accelerator, lambda: require_repository(config))
    if accelerator.device.type == "cpu" and precision.slow_on_cpu:
        accelerator.print(
            f"warning: fp32 would be faster: this processor has no instructions for {precision.name}"
        )
    tokenizer = load_tokenizer(config.model_source, **config.tokenizer_options)
    mesh = process_mesh(accelerator.device, config.shard_size, config.tensor_parallel)
    states = Path(config.output_dir) / STATES
    clock = on_main_process(
        accelerator, lambda: first_start(newest_first(states) if config.resume else ())
    )
    return Context(accelerator, precision, tokenizer, mesh, caller, clock)


def trackers_of(config: StageConfig) -> list[str]:
    return (
        []
        if config.report_to == "none"
        else [name.strip() for name in str(config.report_to).split(",")]
    )


def holding(context: Context, config: StageConfig, model: PackedModel) -> Context:
    """The context in which a model trains, which is whole and in fp32 yet: with another precision
    where fp16, which was not asked for, overflows in a trial of a few tokens. All processes
    get the same. Raises UserError if fp16 was named, and warns if it just holds the trial.
    """
    precision, accelerator = context.precision, context.accelerator
    if precision.weights != torch.float16:
        return context
    overflow = on_main_process(accelerator, lambda: trial_overflow(model, context.device))
    wider = wider_precision(trains=True)
    if overflow is None:
        return context
    if not precision.automatic:
        if overflow.happened:
            raise UserError(
                f"{config.model} overflows fp16: {overflow}: use --precision {wider.name}"
            )
        accelerator.print(
            f"warning: {config.model} may overflow fp16: {overflow}; --precision {wider.name} has a wider range"
        )
        return context
    accelerator.print(
        f"--precision auto: {config.model} in {wider.name}, since in a trial {overflow}"
    )
    AcceleratorState._reset_state()  # it refuses another autocast otherwise; nothing holds the old one yet
    trackers = {"log_with": trackers_of(config) or None, "project_dir": config.output_dir}
    return context._replace(
        accelerator=make_accelerator(config.seed, wider, **trackers), precision=wider
    )


def make_accelerator(seed: int, precision: Precision, **trackers: Any) -> Accelerator:
    """An Accelerator with this precision; the seed of all libraries is set. trackers: accelerate's
    own arguments. Raises ValueError if accelerate would spread the model over the processes, and
    beside a GPU that torch cannot use, unless the CPU is asked for.
    """
    for engine in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if parse_flag_from_env(f"ACCELERATE_USE_{engine}"):
            raise UserError(
                f"accelerate's configuration asks for {engine}, and fastp3o shards models itself: start with torchrun, "
                "or with accelerate launch --multi_gpu and a configuration without it"
            )
    set_seed(seed)
    # What would break up the run's own lines: progress bars of loading and saving, and accelerate's
    # note on tied weights, which are saved once and tied again by loading.
    disable_progress_bar()
    logging.getLogger("accelerate.utils.other").addFilter(
        lambda record: "shared tensor" not in record.getMessage()
    )
    accelerator = Accelerator(
        mixed_precision="no" if precision.autocast is None else "bf16",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=LONGEST_WAIT)],
        **trackers,
    )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != accelerator.num_processes:
        raise UserError(
            f"torchrun started {started} processes, and accelerate sees {accelerator.num_processes}: without a GPU, "
            "set ACCELERATE_USE_CPU=true"
        )
    asked = os.environ.get("CUDA_VISIBLE_DEVICES") == "" or parse_flag_from_env(
        "ACCELERATE_USE_CPU"
    )
    if (
        torch.version.cuda
        and accelerator.device.type == "cpu"
        and os.path.exists("/dev/nvidia0")
        and not asked
    ):
        raise UserError(
            f"torch for CUDA {torch.version.cuda} cannot use this GPU: update its driver, or install torch for an "
            "older CUDA; ACCELERATE_USE_CPU=true trains on the CPU"
        )
    # ACCELERATE_TORCH_DEVICE leaves another device the current one, whose clock, memory and
    # generator would be read.
    if accelerator.device.type == "cuda" and accelerator.device.index is not None:
        torch.cuda.set_device(accelerator.device)
    name = (
        torch.cuda.get_device_name(accelerator.device)
        if accelerator.device.type == "cuda"
        else "the CPU"
    )
    accelerator.print(f"device: {accelerator.num_processes} x {name}, {precision.name}")
    return accelerator


class HeldOut(NamedTuple):
    """Evaluation data, None without any. sets: the places of each named set among the examples."""

    examples: Dataset | None
    sets: dict[str, range]


def load_held_out(
    context: Context, config: StageConfig, loader: Loader, source: Source | None
) -> HeldOut:
    """Loads the sets of evaluation data, one after the other. Raises as `load_examples` does."""
    if not source:
        return HeldOut(None, {})
    sources = evaluation_sets(source)
    parts = [
        load_examples(context, config, loader, one, config.eval_split, config.eval_limit)
        for one in sources.values()
    ]
    ends = [0, *accumulate(map(len, parts))]
    sets = {
        name: range(*places) for name, places in zip(sources, pairwise(ends), strict=True) if name
    }
    return HeldOut(parts[0] if len(parts) == 1 else concatenate_datasets(parts), sets)


def evaluation_sets(source: Source) -> dict[str, Source]:
    """The sources of evaluation data by the names of their sets (`NAME=SOURCE,NAME=SOURCE`); "" for
    one without a name. Raises UserError if a name comes twice.
    """
    if isinstance(source, InMemory) and isinstance(source.value, Mapping):
        return dict(source.value)
    if isinstance(source, InMemory) or not re.match(r"[\w.-]+=", source) or os.path.exists(source):
        return {"": source}
    sets = re.findall(r"([\w.-]+)=(.+?)(?:,(?=[\w.-]+=)|$)", source)
    if len(dict(sets)) < len(sets):
        raise UserError(f"{source}: expected sets with different names, NAME=SOURCE,NAME=SOURCE")
    return dict(sets)


def load_examples(
    context: Context,
    config: DataConfig,
    loader: Loader,
    source: Source,
    split: str,
    limit: int | None,
) -> Dataset:
    """Loads a data set, the same on all processes. Raises ValueError if it has fewer examples than
    processes.
    """
    options = {"split": split, "limit": limit, "clock": context.clock, **config.reading}
    examples, report = loader(source, context.tokenizer, **options)
    context.accelerator.print(f"{source}: {report}")
    if report.truncated_prompts > report.examples / 2:
        context.accelerator.print(
            "warning: most prompts lost their beginning: --max_prompt_tokens keeps more"
        )
    if config.template_settings and not report.templated:
        context.accelerator.print(
            "warning: --chat_template_kwargs has no effect here: no record has messages"
        )
    if len(examples) < context.accelerator.num_processes:
        raise UserError(
            f"{source} has {len(examples)} usable examples, fewer than there are processes"
        )
    return examples
