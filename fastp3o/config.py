"""What all stages' configurations have in common. Every field is a flag of a script and a key of its YAML file."""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import yaml
from transformers import HfArgumentParser

from fastp3o.data.encoding import LONGEST_TEXT
from fastp3o.packing.pack import Packing
from fastp3o.precision import PRECISIONS
from fastp3o.script import DEBUG_HELP

Config = TypeVar("Config")

# transformers' schedules that the learning rate, the warm-up and the number of steps define.
SCHEDULES = ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt")

TOKENS_PER_ROW = 8192
EVALUATION_FLAGS = ("eval_every", "eval_split", "eval_limit")  # they do nothing without evaluation data


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def required(help: str) -> Any:
    return field(metadata={"help": help})


def objective_name(name: str) -> Any:
    """The field `objective` of a configuration that `parse_chosen` can choose: its own name is its only value."""
    return option(name, "What trains.")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Values that are checked when they are set. Errors name the flag."""

    def check_values(self) -> None:
        """What holds for every flag: numbers are finite, whole ones fit what counts with them, names are among those
        that there are.
        """
        for flag in fields(self):
            value = getattr(self, flag.name)
            self.check(not isinstance(value, float) or isfinite(value), flag.name, "a finite number")
            self.check(not isinstance(value, int) or abs(value) <= 2**32, flag.name, "at most 2**32")
            choices = flag.metadata.get("choices")
            self.check(not choices or value in choices, flag.name, f"one of {', '.join(map(str, choices or []))}")

    def check_at_least(self, least: int, *names: str) -> None:
        """None passes: nothing is given."""
        for name in names:
            value = getattr(self, name)
            self.check(value is None or value >= least, name, f"{least} or more" if least == 0 else f"at least {least}")

    def check_alone(self, needed: str, *names: str) -> None:
        """Raises ValueError where flags are set that do nothing without another, which is not."""
        for flag in fields(self):
            if flag.name in names and not getattr(self, needed) and getattr(self, flag.name) != flag.default:
                raise ValueError(f"--{flag.name} does nothing without --{needed}")

    def check(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise ValueError(f"--{name} must be {expected}, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Flags):
    """What leaves a folder that can be gone on from."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("output_dir", "resume")

    output_dir: str = required("Folder of the run: what it makes, and what --resume needs.")
    seed: int = option(0, "Seed of every random choice; the same seed gives the same run.")
    resume: bool = option(
        False,
        "Continue from what is in output_dir, exactly as if the run had not stopped; from the beginning where there is "
        "nothing yet.",
    )

    def check_run(self) -> None:
        self.check(0 <= self.seed < 2**32, "seed", "at least 0 and below 2**32")

    @classmethod
    def changeable(cls) -> set[str]:
        """Options that may be others when a run is resumed, as each step takes them anew."""
        return {name for base in cls.__mro__ for name in vars(base).get("CHANGEABLE", ())}


@dataclass(frozen=True, kw_only=True)
class StageConfig(RunConfig):
    """What all stages that train have in common."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = (
        *("trust_remote_code", "skip_bad_records", "report_to"),
        *("learning_rate", "lr_schedule", "warmup_steps", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay"),
        *("max_grad_norm", "tokens_per_row", "share_prompts", "precision", "gradient_checkpointing", "shard_size"),
        *("save_every", "save_minutes", "eval_every"),
    )

    model: str = required("Model to start from: a Hugging Face causal LM, as a hub name or a folder.")
    trust_remote_code: bool = option(False, "Run model code that comes with a checkpoint. Only for sources you trust.")

    split: str = option("train", "Split of the training data, for hub data sets and folders that have several.")
    eval_split: str = option("train", "Split of the evaluation data.")
    max_prompt_tokens: int = option(512, "Tokens kept of a prompt; longer ones lose their beginning and are counted.")
    max_characters: int = option(
        LONGEST_TEXT,
        "Longest prompt or response of a record, in characters: much longer ones take minutes to tokenise.",
    )
    skip_bad_records: bool = option(
        False, "Skip and count records that cannot be used. Off: the first one stops the run."
    )
    limit: int | None = option(None, "Use only the first this many training examples.")
    eval_limit: int | None = option(None, "Use only the first this many evaluation examples.")

    learning_rate: float = option(1e-5, "Peak learning rate of AdamW.")
    lr_schedule: str = field(
        default="constant",
        metadata={"help": "transformers' name of the schedule after the warm-up.", "choices": list(SCHEDULES)},
    )
    warmup_steps: int = option(0, "Optimizer steps over which the learning rate rises from 0, in every schedule.")
    adam_beta1: float = option(0.9, "AdamW beta 1 (first author's setting).")
    adam_beta2: float = option(0.95, "AdamW beta 2 (first author's setting).")
    adam_eps: float = option(1e-8, "AdamW epsilon (first author's setting).")
    weight_decay: float = option(1e-6, "AdamW weight decay (first author's setting).")
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this norm.")

    tokens_per_row: int = option(
        TOKENS_PER_ROW,
        "Tokens of one packed row, that is of one forward and backward pass on one device; prompts included.",
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
    save_every: int = option(0, "Save the model as a checkpoint every this many steps; 0 saves it at the end only.")
    save_minutes: float = option(10.0, "Save what --resume needs whenever so many minutes have passed; 0 never.")
    eval_every: int = option(0, "Evaluate every this many steps; 0 evaluates at the beginning and at the end only.")
    report_to: str = option("tensorboard", "accelerate's trackers, separated by commas (wandb, ...), or none.")

    def __post_init__(self) -> None:
        self.check_values()
        self.check_at_least(1, "max_prompt_tokens", "max_characters", "limit", "eval_limit", "tokens_per_row")
        self.check_at_least(0, "warmup_steps", "shard_size", "save_every", "save_minutes", "eval_every")
        self.check(self.learning_rate > 0, "learning_rate", "above 0")
        self.check(0 <= self.adam_beta1 < 1, "adam_beta1", "at least 0 and below 1")
        self.check(0 <= self.adam_beta2 < 1, "adam_beta2", "at least 0 and below 1")
        # A parameter without a gradient is moved by 0 / eps.
        self.check(self.adam_eps > 0, "adam_eps", "above 0")
        self.check(self.weight_decay >= 0, "weight_decay", "0 or more")
        self.check(self.max_grad_norm > 0, "max_grad_norm", "above 0")
        self.check_run()

    def evaluates_after(self, step: int, *, last: int) -> bool:
        return step == last or bool(self.eval_every and step % self.eval_every == 0)

    @property
    def packing(self) -> Packing:
        return Packing(self.tokens_per_row, self.share_prompts)


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(StageConfig):
    """What supervised stages have in common: passes over a fixed data set."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("epochs",)

    train_data: str = required(
        "Training data: a hub name (or name:config), or JSONL or parquet files; several with commas between."
    )
    eval_data: str | None = option(None, "Held-out data of the same layout.")
    max_response_tokens: int = option(512, "Tokens kept of a response; longer ones lose their end and are counted.")
    epochs: int = option(1, "Passes over the training data.")
    batch_size: int = option(32, "Examples of one optimizer step, over all processes.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(1, "max_response_tokens", "epochs", "batch_size")
        self.check_evaluation()

    def check_evaluation(self) -> None:
        self.check_alone("eval_data", *EVALUATION_FLAGS)


@dataclass(frozen=True, kw_only=True)
class TrainableConfig(Flags):
    """Which parameters of a policy train."""

    trainable_layers: int = option(
        0, "Train only this many top layers of the body, as the first author did with two; 0 trains everything."
    )
    lora_rank: int = option(0, "Rank of LoRA adapters, which then alone train (needs peft); 0 for none.")
    lora_alpha: float = option(16.0, "LoRA's scale is alpha / rank.")
    lora_targets: str = option("all-linear", "Modules with adapters, separated by commas; all-linear leaves the head.")

    def check_trainable(self) -> None:
        self.check_at_least(0, "trainable_layers", "lora_rank")
        self.check(self.lora_alpha > 0, "lora_alpha", "above 0")
        self.check_alone("lora_rank", "lora_alpha", "lora_targets")
        if self.trainable_layers and self.lora_rank:
            raise ValueError("--trainable_layers and --lora_rank exclude each other: adapters train in every layer")


@dataclass(frozen=True, kw_only=True)
class SamplerConfig(Flags):
    """What samples responses."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("rollout_batch_size", "rollout_memory", "compile_rollouts")

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
    compile_rollouts: bool = option(
        False,
        "Compile the engine's steps with torch, which fuses small kernels. Takes a minute or more at first; a CPU "
        "gains nothing, a GPU has not been measured.",
    )

    def check_sampler(self) -> None:
        self.check_at_least(1, "rollout_batch_size")
        self.check(self.rollout_memory is None or self.rollout_memory > 0, "rollout_memory", "above 0")
        if self.sampler == "transformers" and (self.rollout_memory is not None or self.compile_rollouts):
            raise ValueError("--rollout_memory and --compile_rollouts do nothing with --sampler transformers")


def parse(config_class: type[Config], arguments: list[str] | None = None) -> Config:
    """Reads a stage's configuration from flags, or from one YAML file whose values further flags override.

    Exits with a usage message on an unknown flag or key, on a key that comes twice, and with the field's name on a bad
    value.
    """
    # Without abbreviations: --update would set --updates, until there is another flag of that beginning.
    parser = HfArgumentParser(
        cast(Any, config_class), description=config_class.__doc__, epilog=DEBUG_HELP, allow_abbrev=False
    )
    parser.usage = "%(prog)s [CONFIG.yaml] [--field value ...]"
    path, arguments = split_off_yaml(arguments)
    given = [] if path is None else yaml_as_flags(parser, config_class, path)
    try:
        (config,) = parser.parse_args_into_dataclasses(given + arguments, look_for_args_file=False)
    except ValueError as error:
        message = str(error)
        # Settings that are not ours to parse, such as a loss's, know nothing of flags.
        starts_with_field = message.partition(" ")[0] in {f.name for f in fields(cast(Any, config_class))}
        parser.error(f"--{message}" if starts_with_field else message)
    for flag in fields(cast(Any, config_class)):
        value = getattr(config, flag.name)
        if isinstance(value, str) and value != flag.default and not is_name(value):
            parser.error(f"--{flag.name} must not be empty, or hold what no name can, got {value!r}")
        if flag.name == "objective" and value != flag.default:
            parser.error(f"--objective is {flag.default} in these options, got {value!r}")
    return config


def is_name(value: str) -> bool:
    """Not empty, without the end of a string in C, and of characters: bytes that are none arrive as surrogates."""
    return bool(value.strip()) and "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


def parse_chosen(classes: Mapping[str, type[Config]], arguments: list[str] | None = None) -> Config:
    """Reads, as `parse` does, the configuration that `--objective` names, or `objective` in the YAML file.

    classes: by objective; each has its name in a field `objective` (`objective_name`). With `--help`, the options of
    the objective are explained, or objectives are listed where none is named.
    """
    summaries = [f"  {name:<15}{str(chosen.__doc__).splitlines()[0]}" for name, chosen in classes.items()]
    parser = argparse.ArgumentParser(
        description="\n".join(["objectives, whose options --objective NAME --help explains:", *summaries]),
        epilog=DEBUG_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [CONFIG.yaml] --objective NAME [--field value ...]",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--objective", choices=list(classes), metavar="NAME", help="What trains.")
    path, flags = split_off_yaml(arguments)
    values = {} if path is None else yaml_values(parser, path)
    named = [f"--objective={values['objective']}"] if "objective" in values else []
    known, others = parser.parse_known_args(named + flags)
    if known.objective is not None:
        return parse(classes[known.objective], arguments)
    if {"-h", "--help"} & set(others):
        parser.print_help()
        parser.exit()
    parser.error(f"--objective is missing: one of {', '.join(classes)}")


def split_off_yaml(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """The YAML file, which may come first, and the flags; None for the arguments of the process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    has_file = bool(arguments) and arguments[0].endswith((".yaml", ".yml"))
    return (Path(arguments[0]), arguments[1:]) if has_file else (None, arguments)


def yaml_as_flags(parser: argparse.ArgumentParser, config_class: type, path: Path) -> list[str]:
    """The values as they are written, so that types and choices are checked in one place: as those of flags."""
    values = yaml_values(parser, path)
    unknown = values.keys() - {f.name for f in fields(config_class)}
    if unknown:
        parser.error(f"{path} has fields that {config_class.__name__} does not: {', '.join(sorted(unknown))}")
    return [f"--{name}={value}" for name, value in values.items()]


def yaml_values(parser: argparse.ArgumentParser, path: Path) -> dict[str, str]:
    """The text of each field's value. Exits with a usage message where a field has none, or more than one."""

    def refuse(problem: str) -> NoReturn:
        parser.error(f"{path} {problem}")

    try:
        document = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        parser.error(f"cannot read {path}: {' '.join(str(error).split())}")
    if not isinstance(document, yaml.MappingNode):
        refuse("must hold one `field: value` a line")
    entries = [(str(key.value), value) for key, value in document.value]
    if twice := [name for name, count in Counter(name for name, _ in entries).items() if count > 1]:
        refuse(f"gives more than one value for {', '.join(twice)}")
    if nested := [name for name, value in entries if not isinstance(value, yaml.ScalarNode)]:
        refuse(f"must give one value for {', '.join(nested)}, not a list or fields of its own")
    if empty := [name for name, value in entries if value.tag == "tag:yaml.org,2002:null"]:
        refuse(f"gives no value for {', '.join(empty)}")
    return {name: value.value for name, value in entries}
