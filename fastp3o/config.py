"""One dataclass a stage. Every field is a flag of its script and a key of its YAML file."""

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml
from transformers import HfArgumentParser

from fastp3o.precision import PRECISIONS
from fastp3o_kernels import P3OSettings

Config = TypeVar("Config")


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def required(help: str) -> Any:
    return field(metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """What the three stages have in common."""

    model: str = required("Model to start from: a Hugging Face causal LM, as a hub name or a folder.")
    output_dir: str = required("Folder for checkpoints, metrics and the trainer's state.")
    trust_remote_code: bool = option(False, "Run model code that comes with a checkpoint. Only for sources you trust.")

    split: str = option("train", "Split of the training data, for hub data sets and folders that have several.")
    eval_split: str = option("train", "Split of the evaluation data.")
    max_prompt_tokens: int = option(512, "Tokens kept of a prompt; longer ones lose their beginning and are counted.")
    skip_bad_records: bool = option(False, "Skip and count rows that cannot be used. Off: the first one stops the run.")
    limit: int | None = option(None, "Use only the first this many training rows.")
    eval_limit: int | None = option(None, "Use only the first this many evaluation rows.")

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
        self.check(self.save_every >= 0, "save_every", "0 or more")
        self.check(self.eval_every >= 0, "eval_every", "0 or more")

    def check(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise ValueError(f"--{name} must be {expected}, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(StageConfig):
    """What SFT and reward modelling have in common: passes over a fixed data set."""

    train_data: str = required("Training data: a hub name (or name:config), or JSONL or parquet files.")
    eval_data: str | None = option(None, "Held-out data of the same layout.")
    max_response_tokens: int = option(512, "Tokens kept of a response; longer ones lose their end and are counted.")
    epochs: int = option(1, "Passes over the training data.")
    batch_size: int = option(32, "Rows of one optimizer step, over all processes.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.max_response_tokens >= 1, "max_response_tokens", "at least 1")
        self.check(self.epochs >= 1, "epochs", "at least 1")
        self.check(self.batch_size >= 1, "batch_size", "at least 1")


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
class SFTConfig(TrainableConfig, SupervisedConfig):
    """Stage 1: maximum likelihood of the demonstrations."""

    train_on_prompt: bool = option(
        False, "Also learn the prompt's tokens. For models trained from scratch, which must first learn the language."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_trainable()


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(SupervisedConfig):
    """Stage 2: a scalar head trained on comparisons (Bradley-Terry)."""


@dataclass(frozen=True, kw_only=True)
class OnlineConfig(TrainableConfig, StageConfig):
    """What P3O and the algorithms it is compared with have in common: rollouts, rewards, evaluations."""

    prompts: str = required("Training prompts: a hub name (or name:config), or JSONL or parquet files.")
    eval_prompts: str | None = option(None, "Prompts of the evaluation; a fixed set gives comparable frontiers.")
    reward: str = required("What is maximised: a reward model (folder or hub name) or a function, as module:function.")
    gold_reward: str | None = option(
        None, "A second reward, read in evaluations only: what the first one stands for, where that is known."
    )
    reference: str | None = option(
        None, "The KL's reference policy; the starting model if not given, which with LoRA takes no memory of its own."
    )
    offload: bool = option(False, "Keep reference and reward model on the CPU between uses.")

    learning_rate: float = option(1e-6, "Peak learning rate of AdamW (first author: 1e-6 at 1 B, 8e-6 at 125 M).")
    updates: int = option(500, "Rounds of rollouts and inner epochs.")
    prompts_per_update: int = option(
        64, "Prompts of a round, over all processes; two responses to each are a pair (first author: 64)."
    )
    prompts_per_minibatch: int = option(
        4, "Prompts of one optimizer step, over all processes (first author: 4 at 1 B)."
    )
    responses_per_prompt: int = option(
        2, "K: responses to each prompt. The paper's algorithm has 2; more give all K (K − 1) / 2 pairs, averaged."
    )
    inner_epochs: int = option(4, "Passes over each round's rollouts (first author: 4).")

    max_response_tokens: int = option(128, "Longest response, in tokens (first author: 128).")
    missing_eos_penalty: float = option(0.0, "Subtracted from the reward of a response without an end-of-sequence.")
    rollout_batch_size: int = option(64, "Prompts generated at once on one device.")

    eval_batch_size: int = option(64, "Prompts evaluated at once on one device.")
    eval_samples: int = option(1, "Responses per prompt in an evaluation.")
    eval_at: str = option(
        "", "Evaluate after these updates too, separated by commas; early ones show where a frontier bends."
    )
    samples_every: int = option(20, "Print a table of sample responses every this many updates; 0 never.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_trainable()
        positive = ("updates", "prompts_per_update", "prompts_per_minibatch", "inner_epochs")
        for name in (*positive, "max_response_tokens", "rollout_batch_size", "eval_batch_size", "eval_samples"):
            self.check(getattr(self, name) >= 1, name, "at least 1")
        self.check(self.responses_per_prompt >= 2, "responses_per_prompt", "at least 2")
        self.check(all(part.strip().isdecimal() for part in self.eval_at.split(",") if self.eval_at), "eval_at", COUNTS)
        if self.prompts_per_update % self.prompts_per_minibatch:
            raise ValueError(
                f"--prompts_per_update ({self.prompts_per_update}) must be a multiple of "
                f"--prompts_per_minibatch ({self.prompts_per_minibatch}), so that steps average over equally many"
            )

    def evaluates_after(self, update: int) -> bool:
        at = {int(part) for part in self.eval_at.split(",")} if self.eval_at else set()
        return update in at or update == self.updates or bool(self.eval_every and update % self.eval_every == 0)


COUNTS = "whole numbers separated by commas"


@dataclass(frozen=True, kw_only=True)
class P3OConfig(OnlineConfig, P3OSettings):
    """Stage 3: Pairwise Proximal Policy Optimization. Defaults are the first author's settings for a 1 B model."""

    reward_scaling: str = field(
        default="difference",
        metadata={
            "help": "Divide rewards by the running standard deviation of the reward differences of a pair; absolute: "
            "of the rewards themselves (first author's code; breaks the invariance to shifts per prompt); none.",
            "choices": ["difference", "absolute", "none"],
        },
    )
    reward_clip: float = option(
        10.0,
        "Bound on scaled reward differences, or on scaled rewards with reward_scaling=absolute (first author: 10); "
        "0 for none.",
    )

    def __post_init__(self) -> None:
        OnlineConfig.__post_init__(self)
        P3OSettings.__post_init__(self)
        self.check(self.reward_clip >= 0, "reward_clip", "0 or more")


def parse(config_class: type[Config], arguments: list[str] | None = None) -> Config:
    """Reads a stage's configuration from flags, or from one YAML file whose values further flags override.

    Exits with a usage message on an unknown flag or key, and with the field's name on a bad value.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = HfArgumentParser(config_class, description=config_class.__doc__)
    parser.usage = "%(prog)s [CONFIG.yaml] [--field value ...]"
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        arguments = yaml_as_flags(parser, config_class, Path(arguments[0])) + arguments[1:]
    try:
        (config,) = parser.parse_args_into_dataclasses(arguments)
    except ValueError as error:
        parser.error(str(error))
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
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]
