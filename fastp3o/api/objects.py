"""Objects in the place of options: the configuration gets a name for each, and a run finds them by these names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypedDict, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastp3o.api.loaded_model import saved_model
from fastp3o.config import EVALUATION_DATA, StageConfig
from fastp3o.data.sources import Records
from fastp3o.errors import UserError
from fastp3o.given import Callback, Given
from fastp3o.rewards.function import FunctionReward
from fastp3o.rewards.reward import Reward

DATA = ("prompts", "eval_prompts", "train_data", "eval_data", "ptx_data")
REWARDS = ("reward", "gold_reward")
OPTIONS = ("model", *DATA, *REWARDS)
CALLBACKS = ("on_update", "on_evaluation")

Source = str | Iterable[Mapping[str, Any]]
RewardSource = str | Callable[..., Any]


class Objects(TypedDict, total=False):
    """Objects in the place of options; each is also taken as what the command takes.

    None stands for none, and a Path for its text. model: a loaded transformers model, which stays as it is. tokenizer:
    its tokenizer, by default that of the place that the model was loaded from. Data: a Dataset, or a list of records
    (dicts), in the layouts of files. reward: a function, or several, whose weights are in the configuration's
    `reward_weights`.
    """

    model: str | PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: Source
    eval_prompts: Source
    train_data: Source
    eval_data: Source
    ptx_data: Source
    reward: RewardSource | Sequence[RewardSource]
    gold_reward: RewardSource
    on_update: Callback
    on_evaluation: Callback


def resolved(config: StageConfig, objects: Objects, until_the_end: ExitStack) -> tuple[StageConfig, Given]:
    """The configuration with a name for each object, and the objects by their names.

    Raises UserError for what cannot stand in an option's place, and TypeError for an argument that there is not.
    """
    objects = checked(config, objects)
    names: dict[str, Any] = {}
    data: dict[str, Records] = {}
    rewards: dict[str, Reward] = {}
    timeout = getattr(config, "call_seconds", None)
    for option, value in objects.items():
        if isinstance(value, str) and option in OPTIONS:
            names[option] = value
        elif option in DATA:
            data[option] = records(option, value)
            names[option] = str(data[option])
        elif option in REWARDS:
            names[option] = ",".join(named_rewards(option, value, timeout, rewards))
        elif option == "model":
            names[option] = saved_model(value, objects.get("tokenizer"), config, until_the_end)
    config = replace(config, **names)
    config.check_complete()
    if "on_evaluation" in objects and not any(getattr(config, name, None) for name in EVALUATION_DATA):
        raise UserError("on_evaluation does nothing without eval_data or eval_prompts")
    base = getattr(objects.get("model"), "name_or_path", None)
    callbacks = objects.get("on_update"), objects.get("on_evaluation")
    return config, Given(data, rewards, *callbacks, program_goes_on=True, base=base)


def checked(config: StageConfig, objects: Objects) -> Objects:
    """The objects that are given: none that is None, and texts of paths. Raises for those that fit no option."""
    if unknown := objects.keys() - Objects.__annotations__.keys():
        raise TypeError(f"train() has no argument {', '.join(sorted(unknown))}")
    as_texts = ((name, str(value) if isinstance(value, Path) else value) for name, value in objects.items())
    given = cast(Objects, {name: value for name, value in as_texts if value is not None})
    model = given.get("model")
    if "tokenizer" in given and (model is None or isinstance(model, str)):
        raise UserError("tokenizer= goes with a loaded model, and a model's name has the tokenizer of its folder")
    options = {flag.name for flag in fields(config)}
    if others := sorted((given.keys() & set(OPTIONS)) - options):
        raise UserError(f"{type(config).__name__} has no {', '.join(others)}")
    for name in CALLBACKS:
        if name in given and not callable(given[name]):  # type: ignore[literal-required]
            raise UserError(f"{name} must be a function, got a {type(given[name]).__name__}")  # type: ignore[literal-required]
    return given


def records(option: str, content: Any) -> Records:
    """Raises UserError for what is no list of records."""
    if type(content).__name__ == "DataFrame":  # iterating over it gives the names of its columns
        raise UserError(f"{option} must be a Dataset or a list of records, such as a DataFrame's to_dict('records')")
    if isinstance(content, Mapping):
        splits = f"; it has {', '.join(map(str, content))}" if content else ""
        raise UserError(f"{option} must be a Dataset or a list of records, got a {type(content).__name__}{splits}")
    if not isinstance(content, Iterable) or iter(content) is content:
        raise UserError(
            f"{option} must be a Dataset or a list of records, which can be read twice, got a {type(content).__name__}"
        )
    return Records(f"<{option}>", content)


def named_rewards(option: str, given: Any, timeout: float | None, rewards: dict[str, Reward]) -> list[str]:
    """The names of one or several rewards. Functions are added to `rewards` by their names."""
    names = []
    for each in given if isinstance(given, list | tuple) else [given]:
        if isinstance(each, str):
            names.append(each)
            continue
        if not callable(each):
            raise UserError(f"{option} must be a function or what --{option} takes, got a {type(each).__name__}")
        name = function_name(each)
        if name in rewards:
            name += f" {sum(other.startswith(name) for other in rewards) + 1}"
        rewards[name] = FunctionReward(name, timeout, each)
        names.append(name)
    return names


def function_name(function: Callable) -> str:
    """`module:function`, as the command has it."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"
