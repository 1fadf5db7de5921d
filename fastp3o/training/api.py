"""A configuration and objects to a finished run: an option whose place an object takes has the
object with its name.
"""

import copy
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from inspect import isroutine
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fastp3o.calls.function import FunctionError
from fastp3o.config import DATA, EVALUATION_DATA, OBJECTS, REWARDS, StageConfig
from fastp3o.data.errors import RecordError
from fastp3o.errors import UserError, as_arguments
from fastp3o.models.loaded import LoadedModel
from fastp3o.objectives.config.base import OnlineConfig
from fastp3o.objectives.config.function import FunctionConfig, named_objective
from fastp3o.objectives.config.preferences import PreferenceConfig
from fastp3o.rewards.comparing_function import load_function
from fastp3o.rewards.comparisons import RelativeReward
from fastp3o.rewards.config import RemoteConfig
from fastp3o.rollouts.turns.tools import make_tool
from fastp3o.run.result import Result
from fastp3o.run.signals import StoppedError
from fastp3o.runtime.context import Callback, Caller
from fastp3o.script import let_segments_grow
from fastp3o.sources import InMemory, Source
from fastp3o.training import loop as online
from fastp3o.training import preferences as preference
from fastp3o.training import reward_model, sft
from fastp3o.training.config import RewardModelConfig, SFTConfig

RUNNING = threading.Lock()  # held by the run of this process
os.register_at_fork(after_in_child=lambda: globals().update(RUNNING=threading.Lock()))
PACKAGE = Path(__file__).parents[1]
CALLBACKS = ("on_update", "on_evaluation")
# Fields of peft's LoraConfig: options of the same name, those of another one, and what follows from
# the run.
SAME, OTHERWISE = ("lora_alpha", "lora_dropout", "use_rslora"), ("r", "target_modules")
FOLLOWING = ("task_type", "inference_mode", "base_model_name_or_path", "peft_version")

DataSource = str | Iterable[Mapping[str, Any]]
RewardSource = str | Callable[..., Any] | PreTrainedModel


class Objects(TypedDict, total=False):
    """Objects in place of options; each is also taken as what the command takes.

    None stands for none, and a Path for its text. model: a loaded transformers model, of which the
    run trains a copy; it must stay as it is until the run ends. tokenizer: its tokenizer, by
    default that of the place that the model was loaded from. Data: a Dataset, or a list of records
    (dicts), in the layouts of files; of evaluations also a dict of several by name. environment: a
    class that answers the policy's turns. tools: functions that the policy may call, with type
    hints and docstrings. reward: a function or a loaded reward model, or several of them, whose
    weights are in the configuration's `reward_weights`. objective: of a `FunctionConfig`, a
    function of groups of responses (fastp3o/objectives/README.md). peft_config: a LoraConfig of
    peft, in place of the options of LoRA.
    """

    model: str | PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: DataSource
    eval_prompts: DataSource | Mapping[str, DataSource]
    train_data: DataSource
    eval_data: DataSource | Mapping[str, DataSource]
    ptx_data: DataSource
    environment: str | type
    tools: str | Sequence[Callable[..., Any]]
    reward: RewardSource | Sequence[RewardSource]
    objective: str | Callable[..., Any]
    gold_reward: RewardSource
    peft_config: Any
    on_update: Callback
    on_evaluation: Callback


def train(config: StageConfig, **objects: Unpack[Objects]) -> Result:
    """Runs the stage that a configuration is for: an online objective, fixed preferences,
    fine-tuning, a reward model.

    The folder `config.output_dir` gets the files that the command writes, and `resume=True`
    continues from them, whether the command or Python began the run. A run that began with a loaded
    model or with functions continues with equal ones; functions of the module that Python was
    started with (`__main__`) are found from Python alone.

    objects: model, tokenizer, prompts, eval_prompts, train_data, eval_data, ptx_data, environment,
    tools, reward, gold_reward, objective, peft_config, on_update, on_evaluation;
    `help(fastp3o.training.api.Objects)` says what each may be. The last two are called with the
    metrics of each step and each evaluation, and their `step`; the run ends after that step if they
    return True, and its state is saved if they raise. With several processes they are called on the
    main one.

    Where this process has not used the GPU yet and PYTORCH_ALLOC_CONF is not set, memory comes in
    segments that grow.

    Raises what the commands print in one line, UserError or OSError; KeyboardInterrupt once an
    interrupted run has saved its state, from which `resume=True` continues; StoppedError after
    other signals.
    """
    let_segments_grow()
    with as_the_command():
        stages = {
            OnlineConfig: online,
            PreferenceConfig: preference,
            SFTConfig: sft,
            RewardModelConfig: reward_model,
        }
        stage = next((stage for kind, stage in stages.items() if isinstance(config, kind)), None)
        if stage is None:
            raise UserError(
                f"train takes the configuration of a stage that trains, got a {type(config).__name__}"
            )
        arguments = checked(config, dict(objects))
        config = with_objects(config, arguments)
        try:
            stage.train(config, Caller(arguments.get("on_update"), arguments.get("on_evaluation")))
        except StoppedError as stopped:
            # A notebook keeps the last traceback, and with it the models of the frames.
            traceback.clear_frames(stopped.__traceback__)
            if stopped.number != signal.SIGINT:
                raise
            raise KeyboardInterrupt(f"{stopped.place}; resume=True continues from there") from None
        except UserError as error:  # the message says what to change, and our frames would hide it
            raise error.with_traceback(None) from users_error(error)
        except OSError as error:
            error.args = tuple(
                as_arguments(part) if isinstance(part, str) else part for part in error.args
            )
            raise error.with_traceback(None) from None
    return Result(Path(config.output_dir))


def users_error(error: BaseException) -> BaseException | None:
    """The error that a user's function raised, with its own frames alone; None if it has raised
    nothing.
    """
    cause = error.__cause__
    while isinstance(cause, FunctionError):
        cause = cause.__cause__
    if cause is None or isinstance(cause, RecordError):
        return None
    frame = cause.__traceback__
    while frame is not None and Path(frame.tb_frame.f_code.co_filename).is_relative_to(PACKAGE):
        frame = frame.tb_next
    cause.__cause__, cause.__suppress_context__ = None, True
    return cause.with_traceback(frame)


# --- objects --------------------------------------------------------------------------------------


def checked(config: StageConfig, objects: dict[str, Any]) -> dict[str, Any]:
    """The objects without those that are None, and texts of paths. Raises for those that fit no
    option.
    """
    if unknown := objects.keys() - Objects.__annotations__.keys():
        raise TypeError(f"train() has no argument {', '.join(sorted(unknown))}")
    as_texts = (
        (name, str(value) if isinstance(value, Path) else value) for name, value in objects.items()
    )
    objects = {name: value for name, value in as_texts if value is not None}
    if "tokenizer" in objects and isinstance(objects.get("model", ""), str):
        raise UserError(
            "tokenizer= goes with a loaded model, and a model's name has the tokenizer of its folder"
        )
    options = {flag.name for flag in fields(config)}
    if others := sorted((objects.keys() & set(OBJECTS)) - options):
        raise UserError(f"{type(config).__name__} has no {', '.join(others)}")
    if "objective" in objects and not isinstance(config, FunctionConfig):
        raise UserError(
            f"objective= goes with a FunctionConfig, and {type(config).__name__} has an objective"
        )
    for name in CALLBACKS:
        if name in objects and not callable(objects[name]):
            raise UserError(f"{name} must be a function, got a {type(objects[name]).__name__}")
    return objects


def with_objects(config: StageConfig, objects: dict[str, Any]) -> StageConfig:
    """The configuration with objects in place of options. Raises UserError for what cannot
    stand there.
    """
    named: dict[str, Any] = {
        name: value for name, value in objects.items() if name in (*OBJECTS, "objective")
    }
    for option, value in named.items():
        if isinstance(value, str):
            continue
        if option == "model":
            named[option] = loaded_model(value, objects.get("tokenizer"), config)
        elif option == "objective":
            named[option] = named_objective(value)
        elif option == "environment":
            name = (
                f"{value.__module__}:{value.__qualname__}"
                if isinstance(value, type)
                else type(value).__name__
            )
            named[option] = InMemory(name, value)
        elif option == "tools":
            named[option] = named_tools(value)
        elif option in EVALUATION_DATA and isinstance(value, Mapping):
            sets = {
                name: part if isinstance(part, str) else records(name, part)
                for name, part in value.items()
            }
            named[option] = InMemory(f"<{option}>", sets)
        elif option in DATA:
            named[option] = records(option, value)
        elif option in REWARDS:
            timeout = config.call_seconds if isinstance(config, RemoteConfig) else None
            named[option] = named_rewards(option, value, timeout)
    if "peft_config" in objects:
        named |= lora_options(config, objects["peft_config"])
    config = config.with_values(**named)
    config.check_complete()
    if "on_evaluation" in objects and not any(
        config.values().get(name) for name in EVALUATION_DATA
    ):
        raise UserError("on_evaluation has no effect without eval_data or eval_prompts")
    return config


def lora_options(config: StageConfig, lora: Any) -> dict[str, Any]:
    """The options that stand for peft's configuration. Raises UserError for what no option does."""
    if getattr(lora, "peft_type", None) != "LORA":
        raise UserError(f"peft_config must be a LoraConfig of peft, got a {type(lora).__name__}")
    targets, plain = lora.target_modules, vars(type(lora)())
    if not targets or (isinstance(targets, str) and targets != "all-linear"):
        raise UserError(
            f"peft_config needs target_modules: names in a list, or 'all-linear', got {targets!r}"
        )
    others = {name for name, value in vars(lora).items() if value != plain.get(name)}
    others -= {*SAME, *OTHERWISE, *FOLLOWING}
    if isinstance(config, RewardModelConfig) and lora.modules_to_save == ["score"]:
        others.discard("modules_to_save")  # the head trains in any case
    if others:
        raise UserError(
            f"peft_config has {', '.join(sorted(others))}, which no option of LoRA does here"
        )
    chosen = {"lora_rank": lora.r, **{name: getattr(lora, name) for name in SAME}}
    chosen["lora_targets"] = targets if isinstance(targets, str) else ",".join(sorted(targets))
    for option, value in chosen.items():
        if getattr(config, option) not in (
            value,
            type(config).__dataclass_fields__[option].default,
        ):
            raise UserError(
                f"{option} is {getattr(config, option)} in the configuration, and {value} in peft_config"
            )
    return chosen


def records(option: str, content: Any) -> InMemory:
    """Raises UserError for what is no list of records."""
    # A table's rows are not what iterating over it gives, and an iterator cannot be read twice.
    table = isinstance(content, Mapping) or type(content).__name__ == "DataFrame"
    if table or not isinstance(content, Iterable) or iter(content) is content:
        raise UserError(
            f"{option} must be a Dataset or a list of records, such as splits['train'] or a DataFrame's "
            f"to_dict('records'), got a {type(content).__name__}"
        )
    return InMemory(f"<{option}>", content)


def named_rewards(option: str, rewards: Any, timeout: float | None) -> Source:
    """One or several rewards, by their names. A list within the list is a cascade."""
    parts: list[Source] = []
    for reward in rewards if isinstance(rewards, list | tuple) else [rewards]:
        if isinstance(reward, list | tuple):
            cascade = [named_rewards(option, part, timeout) for part in reward]
            parts.append(InMemory(" else ".join(map(str, cascade)), tuple(cascade)))
        elif isinstance(reward, str):
            parts.append(reward)
        elif isinstance(reward, PreTrainedModel) or hasattr(reward, "peft_config"):
            parts.append(loaded_reward_model(option, reward))
        elif callable(reward):
            named = reward if hasattr(reward, "__qualname__") else type(reward)
            name = f"{named.__module__}:{named.__qualname__}"  # as the command has it
            before = [str(part) for part in parts]
            if name in before:
                name += f" {sum(other.startswith(name) for other in before) + 1}"
            relative = isinstance(reward, RelativeReward)
            parts.append(
                InMemory(name, reward if relative else load_function(name, timeout, reward))
            )
        else:
            raise UserError(
                f"{option} must be a function or what --{option} takes, got a {type(reward).__name__}"
            )
    return parts[0] if len(parts) == 1 else InMemory(",".join(map(str, parts)), parts)


def named_tools(tools: Any) -> InMemory:
    """Functions by their names, as the command has them. Raises UserError for what cannot be a
    tool.
    """
    if isroutine(tools):
        raise UserError(f"tools must be a list: tools=[{tools.__name__}]")
    if not isinstance(tools, list | tuple):
        raise UserError(
            f"tools must be a list of functions or what --tools takes, got a {type(tools).__name__}"
        )
    if not tools:
        raise UserError("tools is an empty list: name a function, or leave it out")
    if texts := [one for one in tools if isinstance(one, str)]:
        form = texts[0] if ":" in texts[0] else f"module:{texts[0]}"
        raise UserError(
            f'tools must be functions in a list, or one text tools="{form}", got {texts[0]!r} '
            "in a list"
        )
    functions = [make_tool(one).function for one in tools]
    return InMemory(
        ",".join(f"{one.__module__}:{one.__qualname__}" for one in functions), functions
    )


def tokenizer_of(model: PreTrainedModel) -> Any:
    """The tokenizer of the place that a model was loaded from. Raises UserError if it has none."""
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except Exception as error:  # transformers' and the hub's errors share no base class
        raise UserError(
            f"{model.name_or_path} has no tokenizer ({error}): give tokenizer="
        ) from error


def refuse_adapters(option: str, model: Any) -> None:
    if hasattr(model, "peft_config") or any(
        hasattr(part, "base_layer") for part in model.modules()
    ):
        raise UserError(
            f"{option} has adapters: save it and its tokenizer, and name their folder, to merge them"
        )


def loaded_reward_model(option: str, model: PreTrainedModel) -> InMemory:
    """A loaded reward model by the name of where it came from, whose tokenizer it has."""
    refuse_adapters(option, model)
    if not hasattr(model, "score"):
        raise UserError(
            f"{option} must be a reward model, with a head `score`, got a {type(model).__name__}"
        )
    if not model.name_or_path:
        raise UserError(
            f"{option} is a model that was not loaded from anywhere, so its tokenizer is unknown: save it"
        )
    return InMemory(model.name_or_path, LoadedModel(model, tokenizer_of(model)))


def loaded_model(model: Any, tokenizer: Any, config: StageConfig) -> InMemory:
    """A loaded model by the name of where it came from. Raises UserError if no run can begin with
    it.
    """
    if not isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config"):
        raise UserError(
            f"model must be a transformers model or what --model takes, got a {type(model).__name__}"
        )
    refuse_adapters("model", model)
    if any(weight.is_meta for weight in model.parameters()):
        raise UserError("model has no weights: they are on the meta device")
    if (
        not (config.lora_rank or config.trainable_layers)
        and len({w.requires_grad for w in model.parameters()}) == 2
    ):
        raise UserError(
            "model has frozen weights beside others, and a run trains all of them, or those that --trainable_layers or "
            "--lora_rank names: give one of these, or model.requires_grad_(True)"
        )
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(
            f"tokenizer must be a transformers tokenizer, got a {type(tokenizer).__name__}"
        )
    if config.lora_rank and config.lora_save == "adapter":
        raise UserError(
            "lora_save='adapter' needs the name of a model: no folder keeps a loaded one, the base"
        )
    if config.lora_rank and config.lora_save == "both" and model.name_or_path:
        print(
            f"adapter/ will name {model.name_or_path} as its base. If model is another by now, model/ alone fits it"
        )
    if tokenizer is None:
        if not model.name_or_path:
            raise UserError("a model that was not loaded from anywhere needs its tokenizer=")
        tokenizer = tokenizer_of(model)
    if model.can_generate():
        try:
            copy.deepcopy(model.generation_config).validate(strict=True)
        except ValueError as error:  # such as one that contradicts itself
            raise UserError(
                f"model could not be saved after the run: {' '.join(str(error).split())}"
            ) from error
    return InMemory(
        model.name_or_path or f"<{type(model).__name__}>", LoadedModel(model, tokenizer)
    )


# --- what a run finds in its process, and leaves as it was ----------------------------------------


@contextmanager
def as_the_command() -> Iterator[None]:
    """Computes as the command does, whatever the caller has set for torch, with accelerate's state
    of a new process: another run may have another precision. Puts back the caller's at the end: a
    trainer of its may continue.

    Raises UserError within another run, in any thread: they share generators, signals and
    accelerate's state.
    """
    if not RUNNING.acquire(blocking=False):
        raise UserError(
            "a run trains in this process already: wait for it, or start another process"
        )
    dtype = torch.get_default_dtype()
    states = [kind._shared_state for kind in (AcceleratorState, GradientState)]
    before = [dict(state) for state in states]
    try:
        for state in states:
            state.clear()
        torch.set_default_dtype(torch.float32)
        with torch.inference_mode(False), torch.enable_grad(), ExitStack() as inside:
            for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                inside.enter_context(torch.autocast(device, enabled=False))
            if torch.get_default_device().type != "cpu":
                # This makes each call into torch a little slower.
                inside.enter_context(torch.device("cpu"))
            yield
    finally:
        torch.set_default_dtype(dtype)
        for state, content in zip(states, before, strict=True):
            state.clear()
            state.update(content)
        RUNNING.release()
