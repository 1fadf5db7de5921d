"""What all stages' configurations have in common. Every field is a flag of a script and a key of its YAML file."""

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from transformers import HfArgumentParser

from fastp3o.packing.pack import Packing
from fastp3o.precision import PRECISIONS

Config = TypeVar("Config")


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def required(help: str) -> Any:
    return field(metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """What all stages have in common."""

    model: str = required("Model to start from: a Hugging Face causal LM, as a hub name or a folder.")
    output_dir: str = required("Folder for checkpoints, metrics and the trainer's state.")
    trust_remote_code: bool = option(False, "Run model code that comes with a checkpoint. Only for sources you trust.")

    split: str = option("train", "Split of the training data, for hub data sets and folders that have several.")
    eval_split: str = option("train", "Split of the evaluation data.")
    max_prompt_tokens: int = option(512, "Tokens kept of a prompt; longer ones lose their beginning and are counted.")
    skip_bad_records: bool = option(
        False, "Skip and count records that cannot be used. Off: the first one stops the run."
    )
    limit: int | None = option(None, "Use only the first this many training examples.")
    eval_limit: int | None = option(None, "Use only the first this many evaluation examples.")

    learning_rate: float = option(1e-5, "Peak learning rate of AdamW.")
    lr_schedule: str = option("constant", "transformers' name of the schedule: constant, linear, cosine, ...")
    warmup_steps: int = option(0, "Optimizer steps over which the learning rate rises from 0.")
    adam_beta1: float = option(0.9, "AdamW beta 1 (first author's setting).")
    adam_beta2: float = option(0.95, "AdamW beta 2 (first author's setting).")
    adam_eps: float = option(1e-8, "AdamW epsilon (first author's setting).")
    weight_decay: float = option(1e-6, "AdamW weight decay (first author's setting).")
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this norm.")

    tokens_per_row: int = option(
        8192, "Tokens of one packed row, that is of one forward and backward pass on one device; prompts included."
    )
    share_prompts: bool = option(True, "Compute the prompt of several responses once.")
    precision: str = field(
        default="auto",
        metadata={
            "help": "Arithmetic of the model's body; log-probabilities and the optimizer are fp32 in any case. "
            "bf16-autocast: fp32 weights. bf16, fp16: weights too, with fp32 master copies of what trains. "
            "auto: on a GPU fp16 for P3O and bf16-autocast for the other stages, else fp32.",
            "choices": list(PRECISIONS),
        },
    )
    shard_size: int = option(
        0, "Processes that hold one model together (HSDP); 0: all. Fewer, such as those of a node, talk less to others."
    )
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")
    seed: int = option(0, "Seed of every random choice; the same seed gives the same run.")

    save_every: int = option(0, "Save a checkpoint every this many steps; 0 saves at the end only.")
    eval_every: int = option(0, "Evaluate every this many steps; 0 evaluates at the beginning and at the end only.")
    resume: bool = option(False, "Continue from the state in output_dir, exactly as if the run had not stopped.")
    report_to: str = option("tensorboard", "accelerate's trackers, separated by commas (wandb, ...), or none.")

    def __post_init__(self) -> None:
        self.check(self.max_prompt_tokens >= 1, "max_prompt_tokens", "at least 1")
        self.check(self.tokens_per_row >= 1, "tokens_per_row", "at least 1")
        self.check(self.learning_rate > 0, "learning_rate", "above 0")
        self.check(self.max_grad_norm > 0, "max_grad_norm", "above 0")
        self.check(self.shard_size >= 0, "shard_size", "0 or more")
        self.check(self.save_every >= 0, "save_every", "0 or more")
        self.check(self.eval_every >= 0, "eval_every", "0 or more")

    def evaluates_after(self, step: int, *, last: int) -> bool:
        return step == last or bool(self.eval_every and step % self.eval_every == 0)

    @property
    def packing(self) -> Packing:
        return Packing(self.tokens_per_row, self.share_prompts)

    def check(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise ValueError(f"--{name} must be {expected}, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class TrainableConfig:
    """Which parameters of a policy train."""

    trainable_layers: int = option(
        0, "Train only this many top layers of the body, as the first author did with two; 0 trains everything."
    )
    lora_rank: int = option(0, "Rank of LoRA adapters, which then alone train (needs peft); 0 for none.")
    lora_alpha: float = option(16.0, "LoRA's scale is alpha / rank.")
    lora_targets: str = option("all-linear", "Modules with adapters, separated by commas; all-linear leaves the head.")

    def check_trainable(self) -> None:
        for name in ("trainable_layers", "lora_rank"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} must be 0 or more, got {getattr(self, name)}")
        if self.trainable_layers and self.lora_rank:
            raise ValueError("--trainable_layers and --lora_rank exclude each other: adapters train in every layer")


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """What samples responses."""

    sampler: str = field(
        default="engine",
        metadata={
            "help": "What samples responses: fastp3o's own engine, or transformers' generate.",
            "choices": ["engine", "transformers"],
        },
    )
    rollout_batch_size: int = option(64, "Prompts sampled at once on one device.")
    rollout_memory: float | None = option(
        None,
        "GB for the engine's keys and values on one device, given back before the update; with less, fewer prompts are "
        "sampled at once. By default a part of what is free.",
    )

    def check_sampler(self) -> None:
        if self.rollout_batch_size < 1:
            raise ValueError(f"--rollout_batch_size must be at least 1, got {self.rollout_batch_size}")
        if self.rollout_memory is not None and self.rollout_memory <= 0:
            raise ValueError(f"--rollout_memory must be above 0, got {self.rollout_memory}")
        if self.sampler not in ("engine", "transformers"):
            raise ValueError(f"--sampler must be engine or transformers, got {self.sampler!r}")


def parse(config_class: type[Config], arguments: list[str] | None = None) -> Config:
    """Reads a stage's configuration from flags, or from one YAML file whose values further flags override.

    Exits with a usage message on an unknown flag or key, and with the field's name on a bad value.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = HfArgumentParser(cast(Any, config_class), description=config_class.__doc__)
    parser.usage = "%(prog)s [CONFIG.yaml] [--field value ...]"
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        arguments = yaml_as_flags(parser, config_class, Path(arguments[0])) + arguments[1:]
    try:
        (config,) = parser.parse_args_into_dataclasses(arguments)
    except ValueError as error:
        message = str(error)
        # Settings that are not ours to parse, such as a loss's, know nothing of flags.
        starts_with_field = message.partition(" ")[0] in {f.name for f in fields(cast(Any, config_class))}
        parser.error(f"--{message}" if starts_with_field else message)
    return config


def yaml_as_flags(parser: HfArgumentParser, config_class: type, path: Path) -> list[str]:
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"cannot read {path}: {error}")
    if not isinstance(values, dict):
        parser.error(f"{path} must hold one `field: value` a line, got {type(values).__name__}")
    unknown = set(values) - {f.name for f in fields(config_class)}
    if unknown:
        parser.error(f"{path} has fields that {config_class.__name__} does not: {', '.join(sorted(map(str, unknown)))}")
    empty = [name for name, value in values.items() if value is None]
    if empty:
        parser.error(f"{path} gives no value for {', '.join(empty)}")
    # As flags, so that types and choices are checked in one place.
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]
