"""The configurations that stages share. Every field is a flag of a script and a key of its YAML file."""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from math import inf, isfinite
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypedDict, TypeVar, Unpack, get_args, get_type_hints

try:
    import yaml
except ModuleNotFoundError as error:  # the first package that only the trainer needs
    raise ModuleNotFoundError("fastp3o's trainer needs further packages: pip install '.[trainer]'") from error

from fastp3o.errors import UserError
from fastp3o.packing.settings import Packing
from fastp3o.script import DEBUG_HELP

Config = TypeVar("Config")

# transformers' schedules that need only the learning rate, the warm-up and the number of steps.
SCHEDULES = ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt")

# Names of `fastp3o.precision.choose_precision`.
PRECISIONS = ("auto", "fp32", "bf16-autocast", "bf16", "fp16")

TOKENS_PER_ROW = 8192
LONGEST_TEXT = 1_000_000  # characters; one of this length takes seconds to tokenise
LARGEST_INT = 2**32
SAMPLERS = ("engine", "transformers", "vllm")
EVALUATION_DATA = ("eval_data", "eval_prompts")  # flags that need evaluation data need one of them
# What the fields' types take, and in words.
KINDS: dict[type, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: ((str, PathLike), "text"),
}


class Rules(TypedDict, total=False):
    """Rules for a flag's value. None always passes: it stands for a flag that is not given.

    needs: the flag without which this one does nothing, or several, one of which is enough; those that a configuration
    does not have are ignored.
    changeable: a resumed run may have another value, since each step reads it anew.
    given: a caller from Python may give an object in the place of the value, after the configuration is made.
    required: there is no run without it.
    """

    above: float
    at_least: float
    below: float
    at_most: float
    choices: Sequence[str]
    needs: str | tuple[str, ...]
    changeable: bool
    given: bool
    required: bool


def option(default: Any, help: str, **rules: Unpack[Rules]) -> Any:
    return field(default=default, metadata={"help": help, **rules})


def required(help: str, **rules: Unpack[Rules]) -> Any:
    return field(metadata={"help": help, **rules})


def required_or_given(help: str) -> Any:
    """A flag that a command must have, and that a caller from Python may replace by an object."""
    return field(default="", metadata={"help": help, "given": True, "required": True})


def objective_name(name: str) -> Any:
    """The field `objective` of a configuration that `parse_chosen` can choose: its own name is its only value."""
    return option(name, "What trains.")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Values that are checked when they are set. Errors name the flag. Numpy's numbers and paths become Python's own
    numbers and texts, which a YAML file can hold.

    A flag's own rules stand in its field. Classes add rules between several flags in `__post_init__`, after their
    parents' checks; those on flags that may be given as objects in `check_complete`.
    """

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for flag in fields(self):
            value = plain_value(flag.name, getattr(self, flag.name), hints[flag.name])
            object.__setattr__(self, flag.name, value)
            if expected := broken_rule(value, flag.metadata):
                raise UserError(f"--{flag.name} must be {expected}, got {value!r}")
        may_come = {flag.name for flag in fields(self) if flag.metadata.get("given")}
        for flag in fields(self):
            if may_come.isdisjoint(self.needed_by(flag.metadata)):
                self.check_needs(self.needed_by(flag.metadata), flag.name)

    def check_complete(self) -> None:
        """Checks what can be checked only once everything is given. Every run begins with it.

        Raises UserError if something is missing, or a flag needs what is.
        """
        for flag in fields(self):
            if flag.metadata.get("required") and not getattr(self, flag.name):
                raise UserError(f"--{flag.name} is missing: {flag.metadata['help']}")
        for flag in fields(self):
            self.check_needs(self.needed_by(flag.metadata), flag.name)

    def needed_by(self, rules: Mapping[str, Any]) -> list[str]:
        """The flags of this configuration, one of which a flag with these rules needs."""
        needs = rules.get("needs", ())
        flags = {flag.name for flag in fields(self)}
        return [name for name in ((needs,) if isinstance(needs, str) else needs) if name in flags]

    def check_needs(self, needed: Sequence[str], *names: str) -> None:
        """Raises UserError if one of the flags `names` is set, and none of those that it needs."""
        flags = {flag.name: flag for flag in fields(self)}
        if not needed or any(getattr(self, name) for name in needed):
            return
        for name in names:
            if getattr(self, name) != flags[name].default:
                raise UserError(f"--{name} does nothing without {' or '.join(f'--{other}' for other in needed)}")


def plain_value(name: str, value: Any, hint: Any) -> Any:
    """The value of a field as the type of its hint. Raises UserError for a value of another type."""
    kind = field_type(hint)
    if value is None and hint is not kind:
        return None
    taken, words = KINDS[kind]
    if not isinstance(value, taken) or isinstance(value, bool) != (kind is bool):
        raise UserError(f"--{name} must be {words}, got {value!r:.80}")
    if type(value) in KINDS:
        return value
    return str.__str__(fspath(value)) if kind is str else kind(value)  # str() of an enum would be its name


def field_type(hint: Any) -> Any:
    """The type of a field that may be None, too."""
    return next((part for part in get_args(hint) if part is not NoneType), hint)


def broken_rule(value: Any, rules: Mapping[str, Any]) -> str:
    """The rule that the value breaks, in words; "" if it keeps all."""
    if value is None:
        return ""
    if isinstance(value, float) and not isfinite(value):
        return "a finite number"
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return "at most 2**32"
    if "choices" in rules:
        return "" if value in rules["choices"] else f"one of {', '.join(rules['choices'])}"
    if isinstance(value, str):
        return ""
    above, below = rules.get("above", -inf) < value, value < rules.get("below", inf)
    inside = rules.get("at_least", -inf) <= value <= rules.get("at_most", inf)
    return "" if above and below and inside else bounds(rules)


def bounds(rules: Mapping[str, Any]) -> str:
    """The bounds of a number in words, such as "at least 0 and below 1"; "" without bounds."""
    if "at_least" in rules and "at_most" in rules:
        return f"within {rules['at_least']} and {rules['at_most']}"
    given = {name.replace("_", " "): rules[name] for name in ("above", "at_least", "below", "at_most") if name in rules}
    if given == {"at least": 0}:
        return "0 or more"
    return " and ".join(f"{name} {'2**32' if bound == LARGEST_INT else bound}" for name, bound in given.items())


@dataclass(frozen=True, kw_only=True)
class RunConfig(Flags):
    """A run that writes a folder and can be resumed."""

    output_dir: str = required("Folder of the run: what it makes, and what --resume needs.", changeable=True)
    seed: int = option(
        0, "Seed of every random choice; the same seed gives the same run.", at_least=0, below=LARGEST_INT
    )
    resume: bool = option(
        False,
        "Continue the run in output_dir exactly as if it had not stopped; without one, begin.",
        changeable=True,
    )

    @classmethod
    def changeable(cls) -> set[str]:
        """Options that may be different when a run is resumed, since each step reads them anew."""
        return {flag.name for flag in fields(cls) if flag.metadata.get("changeable")}


@dataclass(frozen=True, kw_only=True)
class StageConfig(RunConfig):
    """Options of all stages that train."""

    model: str = required_or_given("Model to start from: a Hugging Face causal LM, as a hub name or a folder.")
    trust_remote_code: bool = option(
        False, "Run model code that comes with a checkpoint. Only for sources you trust.", changeable=True
    )

    split: str = option("train", "Split of the training data, for hub data sets and folders that have several.")
    eval_split: str = option("train", "Split of the evaluation data.", needs=EVALUATION_DATA)
    max_prompt_tokens: int = option(
        512, "Tokens kept of a prompt; longer ones lose their beginning and are counted.", at_least=1
    )
    max_characters: int = option(
        LONGEST_TEXT,
        "Longest prompt or response of a record, in characters: much longer ones take minutes to tokenise.",
        at_least=1,
    )
    skip_bad_records: bool = option(
        False, "Skip and count records that cannot be used. Off: the first one stops the run.", changeable=True
    )
    limit: int | None = option(None, "Use only this many training examples, the first.", at_least=1)
    eval_limit: int | None = option(
        None, "Use only this many evaluation examples, the first.", at_least=1, needs=EVALUATION_DATA
    )

    learning_rate: float = option(1e-5, "Peak learning rate of AdamW.", above=0, changeable=True)
    lr_schedule: str = option(
        "constant", "Schedule after the warm-up, by transformers' name.", choices=SCHEDULES, changeable=True
    )
    warmup_steps: int = option(
        0, "Optimizer steps over which the learning rate rises from 0, in every schedule.", at_least=0, changeable=True
    )
    adam_beta1: float = option(0.9, "AdamW beta 1 (first author's setting).", at_least=0, below=1, changeable=True)
    adam_beta2: float = option(0.95, "AdamW beta 2 (first author's setting).", at_least=0, below=1, changeable=True)
    # Not 0: a parameter without a gradient would move by 0 / eps.
    adam_eps: float = option(1e-8, "AdamW epsilon (first author's setting).", above=0, changeable=True)
    weight_decay: float = option(1e-6, "AdamW weight decay (first author's setting).", at_least=0, changeable=True)
    max_grad_norm: float = option(
        1.0, "Gradients with a larger norm are scaled down to this one.", above=0, changeable=True
    )

    tokens_per_row: int = option(
        TOKENS_PER_ROW,
        "Tokens of one packed row, prompts included: of one forward and backward pass on one device.",
        at_least=1,
        changeable=True,
    )
    share_prompts: bool = option(True, "Compute the prompt of several responses once.", changeable=True)
    precision: str = option(
        "auto",
        "Arithmetic of the model's body; log-probabilities and the optimizer are fp32 in any case. "
        "bf16-autocast: fp32 weights, and on a GPU a bf16 copy of them that is sampled. "
        "bf16, fp16: half-precision weights, with fp32 master copies of what trains. "
        "auto: on a GPU fp16 for P3O and bf16-autocast for the other stages (fp16 where the GPU has no bf16), "
        "else fp32. Half precision on a GPU also takes fast attention over packed rows, flash-attn if installed.",
        choices=PRECISIONS,
        changeable=True,
    )
    shard_size: int = option(
        0,
        "Processes that hold one model together (HSDP); 0: all. With those of one node, nodes communicate less.",
        at_least=0,
        changeable=True,
    )
    gradient_checkpointing: bool = option(
        False, "Recompute activations in the backward pass to save memory.", changeable=True
    )
    compile_layers: bool = option(
        False,
        "Compile the layers of the models that train and of the reference with torch, which fuses norms, rotary "
        "positions, gates and residuals. Takes a minute or more at first. Off: a GPU has not been measured, and tests "
        "on CPUs are of correctness.",
        changeable=True,
    )
    save_every: int = option(
        0, "Save the model as a checkpoint every this many steps; 0: only at the end.", at_least=0, changeable=True
    )
    save_minutes: float = option(
        10.0, "Save what --resume needs every this many minutes; 0 never.", at_least=0, changeable=True
    )
    eval_every: int = option(
        0,
        "Evaluate every this many steps; 0: only at the beginning and at the end.",
        at_least=0,
        needs=EVALUATION_DATA,
        changeable=True,
    )
    keep_best: str | None = option(
        None,
        "Keep the model of the best evaluation by this metric, such as reward or loss, in the folder best/.",
        needs=EVALUATION_DATA,
        changeable=True,
    )
    best_is: str | None = option(
        None,
        "Whether the highest or the lowest value is the best; by default the lowest loss, and the highest of all else.",
        choices=("highest", "lowest"),
        needs="keep_best",
        changeable=True,
    )
    early_stopping: int = option(
        0,
        "End the run after this many evaluations in a row that are not better than the best; 0: never.",
        at_least=0,
        needs="keep_best",
        changeable=True,
    )
    report_to: str = option(
        "tensorboard", "accelerate's trackers, separated by commas (wandb, ...), or none.", changeable=True
    )

    push_to_hub: str | None = option(
        None,
        "Upload the finished model, with its adapter and card, to this repository of the Hugging Face Hub (model or "
        "organisation/model). The token is that of `hf auth login`, or HF_TOKEN.",
        changeable=True,
    )
    hub_private: bool = option(
        False, "Make the repository private, if it is new.", needs="push_to_hub", changeable=True
    )

    def evaluates_after(self, step: int, *, last: int) -> bool:
        return step == last or bool(self.eval_every and step % self.eval_every == 0)

    @property
    def lowest_is_best(self) -> bool:
        return self.best_is == "lowest" or (self.best_is is None and self.keep_best == "loss")

    @property
    def packing(self) -> Packing:
        return Packing(self.tokens_per_row, self.share_prompts)


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(StageConfig):
    """Options of stages that pass over a fixed data set."""

    train_data: str = required_or_given(
        "Training data: a hub name (or name:config), or JSONL or parquet files; several with commas between."
    )
    eval_data: str | None = option(None, "Held-out data of the same layout.", given=True)
    max_response_tokens: int = option(
        512, "Tokens kept of a response; longer ones lose their end and are counted.", at_least=1
    )
    epochs: int = option(1, "Passes over the training data.", at_least=1, changeable=True)
    batch_size: int = option(32, "Examples of one optimizer step, over all processes.", at_least=1)


@dataclass(frozen=True, kw_only=True)
class TrainableConfig(Flags):
    """Options that choose the parameters of a policy that train."""

    trainable_layers: int = option(
        0, "Train only this many top layers of the body (first author: 2); 0 trains everything.", at_least=0
    )
    lora_rank: int = option(
        0, "Rank of LoRA adapters; only the adapters train then (needs peft). 0 for none.", at_least=0
    )
    lora_alpha: float = option(16.0, "LoRA's scale is alpha / rank.", above=0, needs="lora_rank")
    lora_targets: str = option(
        "all-linear",
        "Modules with adapters, separated by commas; all-linear: all linear layers except the head.",
        needs="lora_rank",
    )
    lora_dropout: float = option(
        0.0,
        "Dropout of the adapters' inputs, in training passes alone: rollouts, evaluations and references have none. "
        "Refused where the loss compares the policy with itself before an update.",
        at_least=0,
        below=1,
        needs="lora_rank",
    )
    quantize: str | None = option(
        None,
        "Bits of the frozen base's linear layers, by bitsandbytes: 4bit (QLoRA: NF4, double quantization) or 8bit. In "
        "one process; by default the base is not quantized.",
        choices=("4bit", "8bit"),
        needs="lora_rank",
    )
    lora_save: str = option(
        "both",
        "What is saved. merged: the whole model, adapters merged, in model/. adapter: the adapter alone, in adapter/, "
        "as peft has it, which needs its base. both: each in its folder.",
        choices=("both", "merged", "adapter"),
        needs="lora_rank",
        changeable=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trainable_layers and self.lora_rank:
            raise UserError("--trainable_layers and --lora_rank exclude each other: adapters train in every layer")
        if self.quantize and getattr(self, "compile_layers", False):  # of StageConfig
            raise UserError("--quantize and --compile_layers exclude each other: quantized layers are not compiled")
        if self.quantize and getattr(self, "sampler", None) == "vllm":  # of SamplerConfig
            raise UserError("--quantize and --sampler vllm exclude each other: servers would sample from other weights")
        if self.lora_dropout and getattr(self, "compile_layers", False):
            raise UserError(
                "--lora_dropout and --compile_layers exclude each other: a resumed run, compiled anew, drops others"
            )


@dataclass(frozen=True, kw_only=True)
class SamplerConfig(Flags):
    """Options of sampling responses."""

    temperature: float = option(
        1.0,
        "The policy is softmax(logits / temperature): that samples, and has all log-probs (old, new, of the "
        "reference). Below 1 likely tokens are likelier.",
        above=0,
    )
    top_k: int = option(0, "Sample only from the k most likely tokens; 0: from all.", at_least=0)
    top_p: float = option(
        1.0, "Sample only from the most likely tokens that together have this probability.", above=0, at_most=1
    )
    min_p: float = option(
        0.0,
        "Sample only from tokens with at least this share of the most likely one's probability.",
        at_least=0,
        at_most=1,
    )
    sampler: str = option(
        "engine",
        "Samples responses with fastp3o's own engine, with transformers' generate, or on vLLM servers, which the user "
        "starts (fastp3o/rollouts/README.md). On a GPU the engine launches each step as one CUDA graph where the model "
        "allows it.",
        choices=SAMPLERS,
    )
    vllm_url: str | None = option(
        None,
        "vLLM servers of equal models, separated by commas (http://localhost:8000); they share the prompts. The "
        "environment variable VLLM_API_KEY holds their key, if they have one.",
        changeable=True,
    )
    vllm_folder: str | None = option(
        None,
        "Folder in which the servers find new weights, on a file system that they share with this machine. By default "
        "in memory, for servers on this machine.",
        needs="vllm_url",
        changeable=True,
    )
    vllm_transfer: str = option(
        "folder",
        "How new weights reach the servers: through a folder, or over NCCL from GPU to GPU, by vLLM's own weight "
        "transfer (needs vllm here, too; never run by us).",
        choices=("folder", "nccl"),
        needs="vllm_url",
        changeable=True,
    )
    vllm_requests: int = option(
        64,
        "Prompts that each process asks the servers for at once, each with all of its responses.",
        at_least=1,
        needs="vllm_url",
        changeable=True,
    )
    vllm_time_limit: float = option(
        1800.0,
        "Seconds that a server may take to answer, or to load weights.",
        above=0,
        needs="vllm_url",
        changeable=True,
    )
    rollout_batch_size: int = option(64, "Prompts sampled at once on one device.", at_least=1, changeable=True)
    rollout_memory: float | None = option(
        None,
        "GB for the engine's keys and values on one device, freed before the update; with less, fewer prompts are "
        "sampled at once. By default a part of the free memory.",
        above=0,
        changeable=True,
    )
    compile_rollouts: bool = option(
        False,
        "Compile the engine's steps with torch, which fuses small kernels. Takes a minute or more at first; a CPU "
        "gains nothing, a GPU has not been measured.",
        changeable=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampler != "engine" and (self.rollout_memory is not None or self.compile_rollouts):
            raise UserError(f"--rollout_memory and --compile_rollouts do nothing with --sampler {self.sampler}")
        if self.sampler == "vllm" and not self.vllm_urls:
            raise UserError("--sampler vllm needs --vllm_url, the servers that sample")
        if self.sampler != "vllm" and self.vllm_url:
            raise UserError(f"--vllm_url does nothing with --sampler {self.sampler}")

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from a part of the policy's distribution, so that they are no samples of it."""
        return (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)

    @property
    def vllm_urls(self) -> list[str]:
        return [url.strip().rstrip("/") for url in (self.vllm_url or "").split(",") if url.strip()]


class Parser(argparse.ArgumentParser):
    """A parser of a configuration's fields, whose help says defaults and bounds.

    A field `a_b` is the flag --a_b or --a-b. A bool may stand alone (--resume) or take a value (--resume no), and one
    that is True by default also has --no_a_b.
    """

    def __init__(self, config_class: type, **options: Any):
        super().__init__(formatter_class=argparse.ArgumentDefaultsHelpFormatter, **options)
        types = get_type_hints(config_class)
        for flag in fields(config_class):
            self.add_flag(flag, types[flag.name])

    def add_flag(self, flag: Field, kind: Any) -> None:
        """kind: the field's type, or a union of it with None."""
        kind = field_type(kind)
        options: dict[str, Any] = {"help": described(flag.metadata), "type": kind}
        if "choices" in flag.metadata:
            options["choices"] = flag.metadata["choices"]
        if kind is bool:
            options |= {"type": truth, "nargs": "?", "const": True}
        if flag.default is MISSING or flag.metadata.get("required"):
            options["required"] = True
        else:
            options["default"] = flag.default
        self.add_argument(*spellings(flag.name), **options)
        if flag.default is True:
            no = spellings(f"no_{flag.name}")
            self.add_argument(*no, dest=flag.name, action="store_false", help=options["help"])

    def parse_all(self, arguments: list[str]) -> dict[str, Any]:
        """The value of each field. Exits with a usage message for an argument that no flag takes."""
        values, others = self.parse_known_args(arguments)
        if others:
            self.error(unknown(others, [name for action in self._actions for name in action.option_strings]))
        return vars(values)


def spellings(name: str) -> list[str]:
    return [f"--{name}"] + ([f"--{name.replace('_', '-')}"] if "_" in name else [])


def described(rules: Mapping[str, Any]) -> str:
    """The help of a flag, with its bounds."""
    said = bounds(rules)
    return rules["help"] + (f" ({said}; default: %(default)s)" if said else "")


def truth(text: str) -> bool:
    """Raises argparse's error for text that is neither yes nor no."""
    if text.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"expected yes or no, true or false, t or f, y or n, 1 or 0, got {text!r}")


def unknown(arguments: Sequence[str], flags: Sequence[str]) -> str:
    """What is wrong with arguments that no flag takes, with the flag that is nearest to the first of them."""
    name = next((argument.split("=")[0] for argument in arguments if argument.startswith("--")), None)
    if name is None:
        return f"unexpected argument {arguments[0]!r}"
    near = get_close_matches(name, flags, n=1, cutoff=0.8)
    return f"unknown option {name}" + (f"; the nearest one is {near[0]}" if near else "")


def parse(config_class: type[Config], arguments: list[str] | None = None) -> Config:
    """Reads a stage's configuration from flags, or from one YAML file whose values further flags override.

    Exits with a usage message on an unknown flag or key, a key that comes twice, or a bad value, with the flag's name.
    """
    # No abbreviations: --update would set --updates until another flag begins like that.
    parser = Parser(config_class, description=config_class.__doc__, epilog=DEBUG_HELP, allow_abbrev=False)
    parser.usage = "%(prog)s [CONFIG.yaml] [--field value ...]"
    path, arguments = split_off_yaml(arguments)
    given = [] if path is None else yaml_as_flags(parser, config_class, path)
    values = parser.parse_all(given + arguments)
    try:
        config = config_class(**values)
        require_names(config)
        if isinstance(config, Flags):
            config.check_complete()
    except ValueError as error:
        parser.error(str(error))
    return config


def require_names(config: Any) -> None:
    """Raises UserError for a text that can be no name, and for another objective than that of the configuration."""
    for flag in fields(config):
        value = getattr(config, flag.name)
        free = value == flag.default and not flag.metadata.get("required")
        if isinstance(value, str) and not free and not is_name(value):
            raise UserError(f"--{flag.name} must not be empty, or hold what no name can, got {value!r}")
        if flag.name == "objective" and value != flag.default:
            raise UserError(f"--objective is {flag.default} in these options, got {value!r}")


def is_name(value: str) -> bool:
    """Whether it is not blank and has no null character and no surrogates, which stand for undecodable bytes."""
    return bool(value.strip()) and "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


def parse_chosen(classes: Mapping[str, type[Config]], arguments: list[str] | None = None) -> Config:
    """Reads, as `parse` does, the configuration that `--objective` names, or `objective` in the YAML file.

    classes: keys are the objectives; each class has its own in a field `objective` (`objective_name`). `--help`
    explains the options of the objective, or lists the objectives if none is named.
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
    """The YAML file, which may come first, and the flags. arguments: None for those of the process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    has_file = bool(arguments) and arguments[0].endswith((".yaml", ".yml"))
    return (Path(arguments[0]), arguments[1:]) if has_file else (None, arguments)


def yaml_as_flags(parser: argparse.ArgumentParser, config_class: type, path: Path) -> list[str]:
    """The file's values as flags, which are checked like any others."""
    values = yaml_values(parser, path)
    if others := values.keys() - {f.name for f in fields(config_class)}:
        parser.error(f"{path} has fields that {config_class.__name__} does not: {', '.join(sorted(others))}")
    return [f"--{name}={value}" for name, value in values.items()]


def yaml_values(parser: argparse.ArgumentParser, path: Path) -> dict[str, str]:
    """The text of each field's value. Exits with a usage message if a field has none, or more than one."""

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
