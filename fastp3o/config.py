"""The options that stages share, in groups. Configurations are made of them, and a part takes the
narrowest that it reads. A field is a flag of a script, a key of its YAML file and an argument in
Python.
"""

import json
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import Field, dataclass, field, fields
from functools import cached_property
from inspect import cleandoc, get_annotations
from itertools import chain
from math import inf, isfinite
from numbers import Integral, Real
from os import PathLike, fspath
from os.path import exists, expanduser
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypedDict,
    Unpack,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from fastp3o.errors import UserError
from fastp3o.packing.settings import Packing
from fastp3o.sources import InMemory, ModelSource, revised
from fastp3o.trl_names import with_hints

# transformers' schedules that need only the learning rate, the warm-up and the number of steps.
ScheduleName = Literal[
    "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"
]

# Names of `fastp3o.runtime.precision.choose_precision`.
PrecisionName = Literal["auto", "fp32", "bf16-autocast", "bf16", "fp16"]
PRECISIONS = get_args(PrecisionName)
AttentionName = Literal["auto", "fa3", "fa4", "hub"]

TOKENS_PER_ROW = 8192
LONGEST_TEXT = 1_000_000  # characters; one of this length takes seconds to tokenize
LARGEST_INT = 2**32
EVALUATION_DATA = ("eval_data", "eval_prompts")  # flags that need evaluation data need one of them
DATA = ("prompts", "eval_prompts", "train_data", "eval_data", "ptx_data")
REWARDS = ("reward", "gold_reward")
# `train` takes objects in place of their names.
OBJECTS = (
    "model",
    "environment",
    "tools",
    *DATA,
    *REWARDS,
)
# What the fields' types take, and in words.
KINDS: dict[type, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: ((str, PathLike), "text"),
}


# --- rules between options ------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """A condition that a flag needs. flag: the option that the condition is about. words: how
    messages name the condition, after "has no effect without". holds: whether a configuration meets
    it.
    """

    flag: str
    words: str
    holds: Callable[[Any], bool]


class Rule(NamedTuple):
    """A rule between options. options: that it is about; a configuration without one of them has no
    such rule. broken: whether a configuration breaks it. words: the error, where {option} stands
    for the option's value.
    """

    options: tuple[str, ...]
    broken: Callable[[Any], Any]
    words: str


# A flag ("lora_rank"), a flag with a value ("sampler=vllm") or a condition; or several, one of
# which is enough.
Needs = str | Condition | tuple[str | Condition, ...]


# --- declaring an option --------------------------------------------------------------------------


class Rules(TypedDict, total=False):
    """Rules for a flag's value. None always passes: it stands for a flag that is not set.

    needs: what this flag has no effect without. What is about a flag that a configuration does not
    have is ignored. changeable: a resumed run may have another value, since each step reads it
    again. required: there is no run without it. From Python it may come as an object, after the
    configuration is made. python: what Python may have in place of the text: a list of what
    stands between commas; or what the JSON says, a dict or a list. The field's type names it, for
    editors; the value is text in any case.
    """

    above: float
    at_least: float
    below: float
    at_most: float
    needs: Needs
    changeable: bool
    required: bool
    python: type[list | dict]


def option(default: Any, help: str, **rules: Unpack[Rules]) -> Any:
    return field(default=default, metadata={"help": help, **rules})


def required(help: str, **rules: Unpack[Rules]) -> Any:
    return field(default="", metadata={"help": help, "required": True, **rules})


def field_type(hint: Any) -> Any:
    """The type of a field that may be None, too; of one with choices it is text."""
    return (
        str
        if literals(hint)
        else next((part for part in get_args(hint) if part is not NoneType), hint)
    )


def literals(hint: Any) -> tuple[str, ...]:
    """The choices of a field, which its type names as a Literal, for editors, too; none for any
    other type.
    """
    return next(
        (get_args(part) for part in (hint, *get_args(hint)) if get_origin(part) is Literal), ()
    )


# --- a configuration: checks, and values as files hold them ---------------------------------------


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Flags:
    """Values that are checked when they are set. Errors name the flag. Numpy's numbers and paths
    become Python's own numbers and texts, which a YAML file can hold.

    Subclasses are frozen dataclasses without a decorator. Their own options come before those of
    the groups that they are made of. A plain value is another default of a group's option, whose
    help and rules stay. A class without a docstring has its group's. `summary` is the docstring as
    it is written; `__doc__` has the options, too.

    A flag's own rules stand in its field. Classes add rules between flags of several groups in
    `rules`, those within a group in `__post_init__`, after their parents' checks, and further needs
    of flags that they inherit in `further_needs`. named: the options that somebody has set, be it
    to their defaults; the others may yield to those.
    """

    named: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    summary: ClassVar[str] = ""
    # Of the help, for the options that a class is the first to have.
    section: ClassVar[str] = "objective"
    further_needs: ClassVar[Mapping[str, Needs]] = {}
    rules: ClassVar[tuple[Rule, ...]] = ()
    # Names that a class does without, and what to do instead, in words.
    instead: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        docstring: Any = cls.__dict__.get("__doc__")
        cls.summary = cls.__doc__ = cleandoc(docstring) if docstring else cls.summary
        inherited = ChainMap(
            *(getattr(group, "__dataclass_fields__", {}) for group in cls.__mro__[1:])
        )
        for name, default in [*vars(cls).items()]:
            if (
                name in inherited
                and name in get_annotations(cls)
                and not isinstance(default, Field)
            ):
                setattr(cls, name, field(default=default, metadata=inherited[name].metadata))
        dataclass(frozen=True, kw_only=True)(cls)
        names = (name for group in cls.__mro__ for name in get_annotations(group))
        flags = cls.__dataclass_fields__
        cls.__dataclass_fields__ = {name: flags[name] for name in names if name in flags}
        for name, kind_of_value in get_annotations(cls).items():
            if name in flags and (choices := literals(kind_of_value)):
                flags[name].metadata = MappingProxyType(
                    {**flags[name].metadata, "choices": choices}
                )
        helps = (
            f"    {flag.name} (default {flag.default!r}): {flag.metadata.get('help', '')}"
            for flag in fields(cls)
        )
        cls.__doc__ = "\n\n".join([cls.summary, "Options:", *helps])

    def __new__(cls, **values: Any) -> Self:
        names = [flag.name for flag in fields(cls)]
        if unknown := [name for name in values if name not in names]:
            said = with_hints(unknown, names, cls.instead).replace("--", "")
            raise TypeError(f"{cls.__name__} has no option {said}")
        config = super().__new__(cls)
        vars(config)["named"] = values
        return config

    def __post_init__(self) -> None:
        hints, values = get_type_hints(type(self)), vars(self)
        for flag in fields(self):
            text = text_of(flag, values[flag.name])
            value = plain_value(
                flag.name, values[flag.name] if text is None else text, hints[flag.name]
            )
            values[flag.name] = value
            if expected := broken_rule(value, flag.metadata):
                raise UserError(f"--{flag.name} must be {expected}, got {value!r}")
        values.update(self.derived())
        self.check_needs(to_come=OBJECTS)
        for rule in chain.from_iterable(
            vars(group).get("rules", ()) for group in reversed(type(self).__mro__)
        ):
            if values.keys() >= set(rule.options) and rule.broken(self):
                raise UserError(rule.words.format_map(values))

    def derived(self) -> dict[str, Any]:
        """Values that options have in place of what was set, such as one that stands for a
        default that depends on others. Groups add theirs to their parents'.
        """
        return {}

    def with_values(self, **values: Any) -> Self:
        """The same configuration with other values of some options. What nobody has set stays
        unset, so that it may still yield to these.
        """
        return type(self)(**{**self.named, **values})

    def check_complete(self) -> None:
        """Checks what can be checked only once every object has come. Every run begins with it.
        Raises UserError if something is missing, if a flag needs what is, and for a text that can
        be no name.
        """
        for flag in fields(self):
            if flag.metadata.get("required") and not getattr(self, flag.name):
                raise UserError(f"--{flag.name} is missing: {flag.metadata['help']}")
        for flag in fields(self):
            value = getattr(self, flag.name)
            # Surrogates stand for undecodable bytes.
            odd = isinstance(value, str) and (
                "\0" in value or any("\ud800" <= c <= "\udfff" for c in value)
            )
            if odd or (isinstance(value, str) and value != flag.default and not value.strip()):
                raise UserError(
                    f"--{flag.name} must not be empty or contain null bytes or unpaired surrogates, got {value!r}"
                )
            # A function in place of an objective's name is required, and the only one without a
            # default.
            if (
                flag.name == "objective"
                and not flag.metadata.get("required")
                and value != flag.default
            ):
                raise UserError(f"--objective is {flag.default} in these options, got {value!r}")
        self.check_needs()

    def check_needs(self, to_come: Sequence[str] = ()) -> None:
        """Raises UserError for a flag that has no effect without another one. to_come: flags that
        may still be set.
        """
        flags = {flag.name: flag for flag in fields(self)}
        needs_by_flag = [(name, flag.metadata.get("needs", ())) for name, flag in flags.items()]
        for name, needs in [*needs_by_flag, *self.further_needs.items()]:
            if getattr(self, name) == flags[name].default:
                continue
            needed = [need for need in conditions(needs) if need.flag in flags]
            if needed and not any(need.flag in to_come or need.holds(self) for need in needed):
                raise UserError(
                    f"--{name} has no effect without {' or '.join(need.words for need in needed)}"
                )

    def values(self) -> dict[str, Any]:
        """Values by name, for those who take options as data: whatever a configuration has."""
        return {flag.name: getattr(self, flag.name) for flag in fields(self)}

    def plain(self) -> dict[str, Any]:
        """Values by name, such as YAML and JSON hold. What stands for an object is its name."""
        return {
            name: str(value) if isinstance(value, InMemory) else value
            for name, value in self.values().items()
        }


class ObjectiveConfig(Flags):
    """Options of an objective, of which `parse_chosen` chooses one: `class DPOConfig(...,
    objective="dpo")` says the only value that its option `objective` has. preset: other defaults of
    options that it inherits.
    """

    objective: str = option("", "Training objective: the loss, with the options that belong to it.")

    def __init_subclass__(
        cls, objective: str = "", preset: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        values = {"objective": objective, **preset} if objective else preset
        types = get_type_hints(cls)
        for name, default in values.items():
            cls.__annotations__[name] = types[name]
            setattr(cls, name, default)
        super().__init_subclass__()


# --- rules: what an option needs, its type and its bounds -----------------------------------------


def conditions(needs: Needs) -> list[Condition]:
    def condition(need: str | Condition) -> Condition:
        if isinstance(need, Condition):
            return need
        flag, _, value = need.partition("=")
        if value:
            return Condition(
                flag, f"--{flag} {value}", lambda config: getattr(config, flag) == value
            )
        return Condition(flag, f"--{flag}", lambda config: bool(getattr(config, flag)))

    return [condition(need) for need in (needs if isinstance(needs, tuple) else (needs,))]


def text_of(flag: Field, value: Any) -> str | None:
    """The text that stands for a list or a mapping in an option's place; None for another value,
    such as a list of what is no text.
    """
    if flag.metadata.get("python") is list and isinstance(value, list | tuple):
        is_plain = all(isinstance(part, str | PathLike | Real) for part in value)
        return ",".join(map(str, value)) if is_plain else None
    if flag.metadata.get("python") is dict and isinstance(value, Mapping | list | tuple):
        return json.dumps(value)
    return None


def plain_value(name: str, value: Any, hint: Any) -> Any:
    """The value of a field as the type of its hint. Raises UserError for a value of another type."""
    kind = field_type(hint)
    if value is None and NoneType in get_args(hint):
        return None
    if isinstance(value, InMemory) and InMemory in get_args(hint):
        return value
    taken, words = KINDS[kind]
    if not isinstance(value, taken) or isinstance(value, bool) != (kind is bool):
        raise UserError(f"--{name} must be {words}, got {value!r:.80}")
    if type(value) in KINDS:
        return value
    # str() of an enum would be its name.
    return str.__str__(fspath(value)) if kind is str else kind(value)


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
    if isinstance(value, str | InMemory):
        return ""
    above, below = rules.get("above", -inf) < value, value < rules.get("below", inf)
    inside = rules.get("at_least", -inf) <= value <= rules.get("at_most", inf)
    return "" if above and below and inside else bounds(rules)


def bounds(rules: Mapping[str, Any]) -> str:
    """The bounds of a number in words, such as "at least 0 and below 1"; "" without bounds."""
    if "at_least" in rules and "at_most" in rules:
        return f"within {rules['at_least']} and {rules['at_most']}"
    words = {
        name.replace("_", " "): rules[name]
        for name in ("above", "at_least", "below", "at_most")
        if name in rules
    }
    if words == {"at least": 0}:
        return "0 or more"
    return " and ".join(
        f"{name} {'2**32' if bound == LARGEST_INT else bound}" for name, bound in words.items()
    )


# --- sampling -------------------------------------------------------------------------------------


THROUGH_FOLDER = Condition(
    "vllm_url",
    "--vllm_url and --vllm_weights folder",
    lambda config: config.vllm_url and config.vllm_weights == "folder",
)


class SamplerConfig(Flags):
    """Options of sampling responses."""

    section = "sampling"
    temperature: float = option(
        1.0,
        "Sampling temperature. The policy is softmax(logits / temperature) everywhere: in rollouts and in all "
        "log-probs.",
        above=0,
    )
    top_k: int = option(
        0, "Sample only from the k most likely tokens; 0 samples from all.", at_least=0
    )
    top_p: float = option(
        1.0,
        "Nucleus sampling: keep the most likely tokens whose probabilities add up to this; 1 keeps all.",
        above=0,
        at_most=1,
    )
    min_p: float = option(
        0.0,
        "Drop tokens less likely than this fraction of the most likely token's probability; 0 drops none.",
        at_least=0,
        at_most=1,
    )
    stop_strings: str | Sequence[str] | None = option(
        None,
        'Texts that end a response, as a JSON list: ["</answer>", "\\n\\n"]. The response keeps the first of them '
        "and counts as finished. A text of several tokens is detected after the response was sampled, and the rest "
        "is cut. Default: only end-of-sequence tokens end a response.",
        python=dict,
    )
    sampler: Literal["engine", "transformers", "vllm"] = option(
        "engine",
        "Sampler of responses. engine: fastp3o's built-in engine. transformers: generate() of transformers. vllm: "
        "vLLM servers that you start (fastp3o/rollouts/README.md).",
    )
    vllm_url: str | None = option(
        None,
        "URLs of vLLM servers that serve the same model, comma-separated (http://localhost:8000). The environment "
        "variable VLLM_API_KEY holds their key.",
        needs="sampler=vllm",
        changeable=True,
        python=list,
    )
    vllm_weights: Literal["folder", "nccl"] = option(
        "folder",
        "How servers receive new weights. folder: as files, see --vllm_folder. nccl: over NCCL, from GPU to GPU "
        "(untested on GPUs).",
        needs="vllm_url",
        changeable=True,
    )
    vllm_folder: str | None = option(
        None,
        "Folder shared with the servers, through which they receive new weights. Default: shared memory, for "
        "servers on this machine.",
        needs=THROUGH_FOLDER,
        changeable=True,
    )
    vllm_requests: int = option(
        64,
        "Maximum number of concurrent prompts per process, over all servers.",
        at_least=1,
        needs="vllm_url",
        changeable=True,
    )
    vllm_time_limit: float = option(
        1800.0,
        "Seconds that a server has to answer a request, or to load weights.",
        above=0,
        needs="vllm_url",
        changeable=True,
    )
    rollout_batch_size: int = option(
        64, "Prompts sampled at once on one device.", at_least=1, changeable=True
    )
    rollout_memory: float | None = option(
        None,
        "KV-cache size on one device, in GB. Default: 70 percent of the free memory.",
        above=0,
        needs="sampler=engine",
        changeable=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampler == "vllm" and not self.vllm_urls:
            raise UserError("--sampler vllm needs --vllm_url, the servers that sample")
        _ = self.stops

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from a part of the policy's distribution, so that they are no
        samples of it.
        """
        return (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises UserError for text that is no JSON list of texts."""
        try:
            stops = json.loads(str(self.stop_strings or "[]"))
        except ValueError:
            stops = None
        if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise UserError(
                f"--stop_strings must be a JSON list of texts, got {self.stop_strings!r:.80}"
            )
        return tuple(stops)

    @property
    def vllm_urls(self) -> list[str]:
        return [url.strip().rstrip("/") for url in (self.vllm_url or "").split(",") if url.strip()]


# --- the optimizer --------------------------------------------------------------------------------


class OptimizerConfig(Flags):
    """AdamW and its schedule."""

    section = "optimizer"
    optimizer: Literal["adamw", "adamw_8bit"] = option(
        "adamw",
        "adamw: AdamW with moments in fp32. adamw_8bit: moments in 8 bits, by bitsandbytes (arXiv 2110.02861), in "
        "one process.",
    )
    learning_rate: float = option(1e-5, "Peak learning rate of AdamW.", above=0, changeable=True)
    lr_schedule: ScheduleName = option(
        "constant",
        "Learning rate after the warm-up, by transformers' names. constant: stays at its peak. linear: falls to 0 "
        "along a line. cosine: falls to 0 along half a cosine. cosine_with_restarts: the same, in one cycle. "
        "polynomial: falls to 1e-7 along a line. inverse_sqrt: falls with 1 / sqrt(step).",
        changeable=True,
    )
    warmup_steps: int = option(
        0,
        "Optimizer steps over which the learning rate rises from 0 to its peak, in every schedule; 0 disables the "
        "warm-up.",
        at_least=0,
        changeable=True,
    )
    adam_beta1: float = option(
        0.9,
        "AdamW's beta 1, the decay of the first moment (first author's code: 0.9).",
        at_least=0,
        below=1,
        changeable=True,
    )
    adam_beta2: float = option(
        0.95,
        "AdamW's beta 2, the decay of the second moment (first author's code: 0.95).",
        at_least=0,
        below=1,
        changeable=True,
    )
    # Not 0: a parameter without a gradient would move by 0 / eps.
    adam_eps: float = option(
        1e-8,
        "AdamW's epsilon, added to the root of the second moment (first author's code: 1e-8).",
        above=0,
        changeable=True,
    )
    weight_decay: float = option(
        1e-6,
        "AdamW's decoupled weight decay (first author's code: 1e-6); 0 disables it.",
        at_least=0,
        changeable=True,
    )
    max_grad_norm: float = option(
        1.0,
        "Maximum gradient norm: larger gradients are scaled down to it.",
        above=0,
        changeable=True,
    )


# --- data -----------------------------------------------------------------------------------------


class DataConfig(Flags):
    """The data that are read, and what of them."""

    section = "data"
    split: str = option(
        "train", "Split of the training data, for hub data sets and folders that have several."
    )
    limit: int | None = option(
        None, "Use only the first this many examples. Default: all.", at_least=1
    )
    max_prompt_tokens: int = option(
        512,
        "Maximum length of a prompt, in tokens. Longer prompts lose their beginning, and are counted.",
        at_least=1,
    )
    max_characters: int = option(
        LONGEST_TEXT,
        "Maximum length of a text, in characters; a longer one is an error, since it would take minutes to tokenize.",
        at_least=1,
    )
    chat_template_kwargs: str | Mapping[str, Any] | None = option(
        None,
        'Variables of the chat template, as a JSON object: {"enable_thinking": false}. A record may have its own, '
        "in a field of this name. They change only prompts that are messages: a prompt that is text uses no "
        "template.",
        python=dict,
    )
    skip_bad_records: bool = option(
        False,
        "Skip records that cannot be used, and count them. By default the first one stops the run.",
        changeable=True,
    )
    max_response_tokens: int = option(
        128, "Maximum length of a response, in tokens (first author: 128).", at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.template_settings

    @property
    def template_settings(self) -> dict[str, Any]:
        """The chat template's variables by name. Raises UserError for text that is no JSON object."""
        try:
            settings = json.loads(str(self.chat_template_kwargs or "{}"))
        except ValueError:
            settings = None
        if not isinstance(settings, dict):
            raise UserError(
                f"--chat_template_kwargs must be a JSON object, got {self.chat_template_kwargs!r:.80}"
            )
        return settings

    @property
    def reading(self) -> dict[str, Any]:
        """Options of loading, whatever the data."""
        options = {
            name: getattr(self, name)
            for name in ("max_prompt_tokens", "max_characters", "skip_bad_records")
        }
        return options | {"chat_template_kwargs": self.template_settings}

    @property
    def longest_sequence(self) -> int:
        """Tokens of a prompt and a response at most."""
        return self.max_prompt_tokens + self.max_response_tokens


# --- which parameters train -----------------------------------------------------------------------


class TrainableConfig(Flags):
    """Options that choose the parameters of a policy that train."""

    section = "adapters"
    trainable_layers: int = option(
        0,
        "Train only this many top layers of the body (first author: 2); 0 trains all parameters.",
        at_least=0,
    )
    lora_rank: int = option(
        0,
        "Rank of LoRA adapters, the only parameters that train then (needs peft); 0 disables LoRA.",
        at_least=0,
    )
    lora_alpha: float = option(
        16.0,
        "LoRA's alpha: the adapters' output is scaled by alpha / rank.",
        above=0,
        needs="lora_rank",
    )
    use_rslora: bool = option(
        False,
        "Scale the adapters' output by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732).",
        needs="lora_rank",
    )
    lora_targets: str | Sequence[str] = option(
        "all-linear",
        "Modules that get adapters, comma-separated. all-linear: all linear layers except the head.",
        needs="lora_rank",
        python=list,
    )
    lora_dropout: float = option(
        0.0,
        "Dropout probability of the adapters' inputs, in training passes only; 0 disables it.",
        at_least=0,
        below=1,
        needs="lora_rank",
    )
    quantize: Literal["4bit", "8bit"] | None = option(
        None,
        "Quantize the frozen base model with bitsandbytes, in one process. 4bit: NF4, as in QLoRA. 8bit: "
        "LLM.int8(). Default: not quantized.",
        needs="lora_rank",
    )
    lora_save: Literal["both", "merged", "adapter"] = option(
        "both",
        "Form in which a model with adapters is saved. merged: the whole model, in model/. adapter: the adapter "
        "alone, which needs its base model, in adapter/. both: the two of them.",
        needs="lora_rank",
        changeable=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trainable_layers and self.lora_rank:
            raise UserError(
                "--trainable_layers and --lora_rank cannot be combined: adapters train in every layer"
            )


# --- the model ------------------------------------------------------------------------------------


class LoadingConfig(Flags):
    """How models are loaded, and their attention."""

    section = "model"
    trust_remote_code: bool = option(
        False,
        "Run model code that comes with a checkpoint, or with the base model that an adapter names. Only for "
        "sources you trust.",
        changeable=True,
    )
    chat_template: str | None = option(
        None,
        "File of a chat template (Jinja) that replaces the tokenizer's, also in the models that are saved.",
    )
    attention: AttentionName = option(
        "auto",
        "Attention kernel on a GPU. auto: flash-attn 2 if it is installed, else torch's own. fa3, fa4: torch's "
        "interface to an installed flash-attn 3 or 4. hub: flash-attn 2, on Hopper 3, from the hub or its cache "
        "(needs kernels, and torch 2.11 to 2.13). Only torch's own kernel has been tested on hardware, an H100.",
        changeable=True,
    )

    @property
    def packing(self) -> Packing:
        """How rows are packed."""
        return Packing(TOKENS_PER_ROW)

    @property
    def offload(self) -> bool:
        """Whether models that do not train are on the CPU between uses."""
        return False

    @property
    def tokenizer_options(self) -> dict[str, Any]:
        """Options of `load_tokenizer`."""
        return {"trust_remote_code": self.trust_remote_code, "chat_template": self.chat_template}


class ModelConfig(Flags):
    """The model, its arithmetic and its rows."""

    section = "model"
    model: str | InMemory = required(
        "Model to start from: a Hugging Face causal LM, as a hub name or a folder."
    )
    model_revision: str | None = option(
        None, "Branch, tag or commit of the model on the hub. Default: main."
    )
    precision: PrecisionName = option(
        "auto",
        "Arithmetic of the model's body; log-probabilities and the optimizer are always in fp32. fp32: weights in "
        "fp32. bf16-autocast: weights in fp32, computed in bf16; on a GPU a bf16 copy is sampled. bf16, fp16: "
        "half-precision weights, with fp32 master weights of the trained parameters. auto: on a GPU fp16 for P3O "
        "and bf16-autocast for others (fp16 if the GPU has no bf16), else fp32. A model that overflows fp16 in a "
        "trial of a few tokens is computed in bf16, or in fp32 if there is no bf16.",
        changeable=True,
    )
    deterministic: bool = option(
        False,
        "Use deterministic GPU kernels, including attention's backward pass: the same bits each time. Slower.",
        changeable=True,
    )
    tokens_per_row: int | None = option(
        None,
        "Tokens of a packed row, prompts included. One row is one forward and backward pass: more tokens take more "
        f"memory. Default: {TOKENS_PER_ROW}, and on a CPU fewer where free memory would not hold their activations.",
        at_least=1,
        changeable=True,
    )
    share_prompts: bool = option(
        True, "Compute each prompt once, and share it among its responses.", changeable=True
    )
    shard_size: int = option(
        0,
        "Processes that hold one copy of the model together (HSDP), such as those of a node; 0: all processes.",
        at_least=0,
        changeable=True,
    )
    tensor_parallel: int = option(
        1,
        "Processes that compute each layer together (tensor parallelism); 1 disables it.",
        at_least=1,
        changeable=True,
    )
    gradient_checkpointing: bool = option(
        False, "Recompute activations in the backward pass to save memory.", changeable=True
    )
    compile_layers: bool = option(
        False,
        "Compile with torch the layers of all models that train or sample and of the reference, which fuses norms, "
        "rotary positions, gates and residuals. Takes a minute or more at the start; makes sampling slower on a "
        "CPU; not measured on a GPU.",
        changeable=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_revision and (isinstance(self.model, InMemory) or exists(self.model)):
            raise UserError(
                f"--model_revision needs the name of a hub repository, and --model {self.model} is not one"
            )

    @property
    def model_source(self) -> ModelSource:
        """The model at the revision that is asked for."""
        return revised(self.model, self.model_revision)


class PolicyConfig(SamplerConfig, DataConfig, LoadingConfig):
    """A policy that is loaded and sampled."""


# --- environments ---------------------------------------------------------------------------------


TURNS = ("environment", "tools")  # what answers the policy's turns


class EnvironmentConfig(Flags):
    """Responses of several turns, which an environment or tools answer."""

    section = "turns"
    environment: str | InMemory | None = option(
        None,
        "Class whose objects answer the policy's turns, as module:Class (fastp3o/rollouts/README.md). Default: "
        "responses of one turn, without an environment.",
    )
    tools: str | InMemory | None = option(
        None,
        "Functions that the policy may call, as module:function, comma-separated (fastp3o/rollouts/tools.md). Their "
        "type hints and docstrings reach the chat template. Default: none.",
        python=list,
    )
    max_turns: int = option(8, "Maximum number of turns in a response.", at_least=1, needs=TURNS)
    max_turn_tokens: int = option(
        128,
        "Maximum length of one turn, in tokens; --max_response_tokens limits all turns and observations together.",
        at_least=1,
        needs=TURNS,
    )
    observation_role: Literal["text", "user", "tool"] = option(
        "text",
        "How observations are written. text: as plain text behind the turn. user, tool: as chat messages of this role. "
        "With --tools the default is tool.",
        needs=TURNS,
    )
    environment_timeout: float | None = option(
        None,
        "Seconds that environments or tools may take to answer one round of turns. Default: no limit.",
        above=0,
        needs=TURNS,
    )
    environment_errors: Literal["stop", "end"] = option(
        "stop",
        "Reaction to a step of an environment that raises, is late or returns something invalid. stop: the run "
        "stops. end: only that trajectory ends. A reset that fails stops the run in both cases.",
        needs=TURNS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tools and self.environment:
            raise UserError(
                "--tools and --environment cannot be combined: an environment answers calls by itself"
            )

    def derived(self) -> dict[str, Any]:
        values = super().derived()
        if self.tools and "observation_role" not in self.named:
            values["observation_role"] = "tool"
        return values

    @property
    def has_turns(self) -> bool:
        """Whether responses are trajectories of several turns."""
        return bool(self.environment or self.tools)

    @property
    def message_role(self) -> str | None:
        """The role of observations that are chat messages; None for plain text."""
        return None if self.observation_role == "text" else self.observation_role

    @property
    def responses_per_prompt(self) -> int:
        """Trajectories that begin at each prompt."""
        return 1


# --- evaluations during a run ---------------------------------------------------------------------


class EvaluationConfig(Flags):
    """Evaluations during a run, and what they decide."""

    section = "evaluation"
    eval_split: str = option("train", "Split of the evaluation data.", needs=EVALUATION_DATA)
    eval_limit: int | None = option(
        None,
        "Use only the first this many evaluation examples. Default: all.",
        at_least=1,
        needs=EVALUATION_DATA,
    )
    eval_every: int = option(
        0,
        "Evaluate every this many steps; 0: only before the first step and after the last.",
        at_least=0,
        needs=EVALUATION_DATA,
        changeable=True,
    )
    keep_best: str | None = option(
        None,
        "Evaluation metric by which the best model is kept, in best/. Default: none is kept.",
        needs=EVALUATION_DATA,
        changeable=True,
    )
    best_is: Literal["highest", "lowest"] | None = option(
        None,
        "Best value of --keep_best: the highest or the lowest. Default: the lowest for loss, else the highest.",
        needs="keep_best",
        changeable=True,
    )
    early_stopping: int = option(
        0,
        "Stop after this many evaluations without a new best; 0 disables it.",
        at_least=0,
        needs="keep_best",
        changeable=True,
    )

    def evaluates_after(self, step: int, *, last: int) -> bool:
        return step == last or bool(self.eval_every and step % self.eval_every == 0)


# --- the run and its folder -----------------------------------------------------------------------


class RunConfig(Flags):
    """A run that writes a folder and can be resumed."""

    section = "run"
    output_dir: str = required(
        "Folder of the run: its results, logs, and the state that --resume needs.", changeable=True
    )
    seed: int = option(
        0,
        "Seed of all random choices. The same seed gives the same run.",
        at_least=0,
        below=LARGEST_INT,
    )
    resume: bool = option(
        False,
        "Continue the run in output_dir as if it had not stopped (on GPUs to the bit only with --deterministic), or "
        "begin if there is none.",
        changeable=True,
    )
    overwrite: bool = option(
        False, "Delete the files of an earlier run in output_dir, and begin again.", changeable=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_dir:
            _ = self.folder
        if self.resume and self.overwrite:
            raise UserError("--resume and --overwrite cannot be combined")

    def derived(self) -> dict[str, Any]:
        return super().derived() | {"output_dir": expanduser(self.output_dir)}

    @cached_property
    def folder(self) -> Path:
        """`output_dir`, wherever users' code may lead the working directory later."""
        return Path(self.output_dir).absolute()

    @classmethod
    def changeable(cls) -> set[str]:
        """Options that may be different when a run is resumed, since each step reads them again."""
        return {flag.name for flag in fields(cls) if flag.metadata.get("changeable")}


class TrainingRunConfig(Flags):
    """Options of what a run that trains saves, reports and uploads."""

    section = "run"
    save_every: int = option(
        0,
        "Save the model as a checkpoint every this many steps; 0: only at the end.",
        at_least=0,
        changeable=True,
    )
    keep_checkpoints: int = option(
        0,
        "Number of newest checkpoints of --save_every to keep; 0 keeps all.",
        at_least=0,
        needs="save_every",
        changeable=True,
    )
    save_minutes: float = option(
        10.0,
        "Save a resumable state every this many minutes; 0 disables it.",
        at_least=0,
        changeable=True,
    )
    hang_minutes: float = option(
        10.0,
        "Abort if a process makes no progress for this many minutes; 0 disables the check.",
        at_least=0,
        changeable=True,
    )
    report_to: str | Sequence[str] = option(
        "tensorboard",
        "Trackers of accelerate that get the metrics, comma-separated (tensorboard, wandb, trackio, ...), or none.",
        changeable=True,
        python=list,
    )
    run_name: str | None = option(None, "Name of the run in wandb and trackio.", changeable=True)
    push_to_hub: str | None = option(
        None,
        "Repository of the Hugging Face Hub to upload the finished model to (log in with `hf auth login`). Default: "
        "no upload.",
        changeable=True,
    )
    hub_private: bool = option(
        False, "Make the repository private if it is new.", needs="push_to_hub", changeable=True
    )


# --- stages ---------------------------------------------------------------------------------------


STAGE_RULES = (
    Rule(
        ("quantize", "compile_layers"),
        lambda config: config.quantize and config.compile_layers,
        "--quantize and --compile_layers cannot be combined: quantized layers are not compiled",
    ),
    Rule(
        ("lora_dropout", "compile_layers"),
        lambda config: config.lora_dropout and config.compile_layers,
        "--lora_dropout and --compile_layers cannot be combined: a resumed run would draw different dropout masks",
    ),
    Rule(
        ("deterministic", "top_p"),
        lambda config: config.deterministic and config.top_p < 1,
        "--deterministic and --top_p cannot be combined: torch's sums for it differ on GPUs",
    ),
    Rule(
        ("quantize", "sampler"),
        lambda config: config.quantize and config.sampler == "vllm",
        "--quantize and --sampler vllm cannot be combined: servers would sample from other weights",
    ),
)


class StageConfig(
    OptimizerConfig,
    DataConfig,
    TrainableConfig,
    ModelConfig,
    LoadingConfig,
    EvaluationConfig,
    TrainingRunConfig,
    RunConfig,
):
    """Options of all stages that train."""

    rules: ClassVar[tuple[Rule, ...]] = STAGE_RULES

    @cached_property
    def packing(self) -> Packing:
        """How rows are packed: as they are asked for, or what `with_packing` was told."""
        return Packing(self.tokens_per_row or TOKENS_PER_ROW, self.share_prompts)

    def with_packing(self, packing: Packing) -> Self:
        """The same configuration, whose rows are packed like this. `tokens_per_row` still says what
        was asked for, since a resumed run may have other memory.
        """
        copied = copy(self)
        vars(copied)["packing"] = packing
        return copied

    @property
    def needs_reference(self) -> bool:
        """Whether a reference is loaded."""
        return False


class SupervisedConfig(StageConfig):
    """Options of stages that pass over a fixed data set."""

    section = "data"
    train_data: str | InMemory = required(
        "Training data: a hub name (or name:config), or JSONL or parquet files; several are comma-separated.",
        python=list,
    )
    eval_data: str | InMemory | None = option(
        None,
        "Held-out data of the same layout. Several sets, each with metrics of its own: NAME=SOURCE,NAME=SOURCE. "
        "Default: none.",
        python=list,
    )
    max_response_tokens: int = option(
        512,
        "Maximum length of a response, in tokens. Longer responses lose their end, and are counted.",
        at_least=1,
    )
    epochs: int = option(1, "Passes over the training data.", at_least=1, changeable=True)
    batch_size: int = option(32, "Examples per optimizer step, summed over processes.", at_least=1)
