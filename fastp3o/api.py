"""Training from Python: what the scripts do, on objects.

from fastp3o import P3OConfig, train

result = train(
    P3OConfig(model="Qwen/Qwen3-0.6B", output_dir="runs/p3o", updates=100),
    prompts=[{"prompt": "How are you?"}, ...],
    reward=lambda prompts, responses: [float(len(response)) for response in responses],
)
result.model, result.tokenizer, result.history
"""

import json
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from fastp3o.config import EVALUATION_DATA, StageConfig, TrainableConfig, require_names
from fastp3o.data.sources import Records
from fastp3o.errors import UserError
from fastp3o.given import Callback, Given
from fastp3o.objectives.config import OnlineConfig
from fastp3o.objectives.preferences import PreferenceConfig
from fastp3o.rewards.function import FunctionReward
from fastp3o.rewards.reward import Reward
from fastp3o.stages import online, preference, reward_model, sft
from fastp3o.stages.config import RewardModelConfig, SFTConfig
from fastp3o.stages.setup import quiet_libraries
from fastp3o.training.run_files import ADAPTER, BEST_MODEL, EVALUATIONS, FINISHED_MODEL, METRICS
from fastp3o.training.stopping import StoppedError

if TYPE_CHECKING:
    import pandas as pd

RUNNING = threading.Lock()

DATA = ("prompts", "eval_prompts", "train_data", "eval_data", "ptx_data")
REWARDS = ("reward", "gold_reward")
CLASSIFIER = "ForSequenceClassification"

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


@dataclass(frozen=True)
class Result:
    """What a finished run has left in its folder. output_dir: the folder."""

    output_dir: Path

    @cached_property
    def model(self) -> PreTrainedModel:
        """The finished model, loaded from the folder onto the CPU; with its adapter, if that alone was saved."""
        return load_model(self.output_dir / FINISHED_MODEL)

    @cached_property
    def best_model(self) -> PreTrainedModel:
        """The model of the best evaluation, which `keep_best` keeps. Raises UserError if none was kept."""
        folder = self.output_dir / BEST_MODEL
        if not folder.exists():
            raise UserError(f"{self.output_dir} has no {BEST_MODEL}: keep_best, the name of a metric, keeps one")
        return load_model(folder)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        folder = self.output_dir / FINISHED_MODEL
        return AutoTokenizer.from_pretrained(folder if folder.exists() else self.output_dir / ADAPTER)

    @cached_property
    def history(self) -> "pd.DataFrame":
        """A row for each step: the metrics of metrics.jsonl, and those of eval.jsonl after `eval/`."""
        import pandas as pd

        def table(name: str) -> pd.DataFrame:
            path = self.output_dir / name
            lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            return pd.DataFrame(lines, columns=None if lines else ["step"]).set_index("step")

        return table(METRICS).join(table(EVALUATIONS).add_prefix("eval/"), how="outer")


def train(config: StageConfig, **objects: Unpack[Objects]) -> Result:
    """Runs the stage that a configuration is for: an online objective, fixed preferences, fine-tuning, a reward model.

    The folder `config.output_dir` gets the files that the command writes, and `resume=True` goes on from them, whether
    the command or Python began the run. A run that began with a loaded model or with functions goes on with equal ones;
    functions of the module that Python was started with (`__main__`) are found from Python alone.

    objects: see `Objects`. on_update, on_evaluation: called with the metrics of each step and each evaluation, and
    their `step`; the run ends after that step if they return True, and its state is saved if they raise. With several
    processes they are called on the main one.

    Raises what the commands print in one line, UserError or OSError; KeyboardInterrupt once an interrupted run has
    saved its state, from which `resume=True` goes on; StoppedError after other signals.
    """
    with ExitStack() as until_the_end:
        until_the_end.enter_context(only_run())
        until_the_end.enter_context(torch_defaults())
        until_the_end.enter_context(accelerate_state())
        config, given = resolved(config, objects, until_the_end)
        try:
            stage_of(config)(config, given)
        except StoppedError as stopped:
            # A notebook keeps the last traceback, and with it the models of the frames.
            traceback.clear_frames(stopped.__traceback__)
            if stopped.number != signal.SIGINT:
                raise
            raise KeyboardInterrupt(f"{stopped.place}; resume=True goes on from there") from None
    return Result(Path(config.output_dir))


@contextmanager
def only_run() -> Iterator[None]:
    """Raises UserError within another one, also in another thread: runs of a process share its generators of random
    numbers, its signals and accelerate's state.
    """
    if not RUNNING.acquire(blocking=False):
        raise UserError("a run trains in this process already: wait for it, or start another process")
    try:
        yield
    finally:
        RUNNING.release()


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Computes as the command does, whatever the caller has set for torch, and puts that back at the end."""
    dtype = torch.get_default_dtype()
    with ExitStack() as inside:
        inside.enter_context(torch.inference_mode(False))
        inside.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                inside.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            inside.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


@contextmanager
def accelerate_state() -> Iterator[None]:
    """Begins with accelerate's state of a new process, for the next run may have another precision, and puts back the
    caller's, which may belong to a trainer that goes on.
    """
    states = [kind._shared_state for kind in (AcceleratorState, GradientState)]
    before = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        yield
    finally:
        for state, content in zip(states, before, strict=True):
            state.clear()
            state.update(content)


def stage_of(config: StageConfig) -> Callable[[Any, Given], None]:
    """The function that trains with a configuration."""
    match config:
        case OnlineConfig():
            return online.train
        case PreferenceConfig():
            return preference.train
        case SFTConfig():
            return sft.train
        case RewardModelConfig():
            return reward_model.train
    raise UserError(f"train takes the configuration of a stage that trains, got a {type(config).__name__}")


def resolved(config: StageConfig, objects: Objects, until_the_end: ExitStack) -> tuple[StageConfig, Given]:
    """The configuration with a name for each object, and the objects by their names."""
    unknown = objects.keys() - Objects.__annotations__.keys()
    if unknown:
        raise TypeError(f"train() has no argument {', '.join(sorted(unknown))}")
    stage_of(config)
    as_texts = ((name, str(value) if isinstance(value, Path) else value) for name, value in objects.items())
    objects = cast(Objects, {name: value for name, value in as_texts if value is not None})
    model, tokenizer = objects.get("model"), objects.get("tokenizer")
    if tokenizer is not None and (model is None or isinstance(model, str)):
        raise UserError("tokenizer= goes with a loaded model, and a model's name has the tokenizer of its folder")
    options = {flag.name for flag in fields(config)}
    if others := sorted((objects.keys() & {*DATA, *REWARDS, "model"}) - options):
        raise UserError(f"{type(config).__name__} has no {', '.join(others)}")
    names: dict[str, Any] = {}
    data: dict[str, Records] = {}
    rewards: dict[str, Reward] = {}
    timeout = getattr(config, "call_seconds", None)
    for option, value in objects.items():
        if option in DATA and not isinstance(value, str):
            data[option] = records(option, value)
            names[option] = str(data[option])
        elif option in REWARDS and not isinstance(value, str):
            names[option] = ",".join(named_rewards(option, value, timeout, rewards))
        elif option == "model" and not isinstance(value, str):
            names[option] = saved_model(value, tokenizer, config, until_the_end)
        elif option in (*DATA, *REWARDS, "model"):
            names[option] = value
    callbacks = objects.get("on_update"), objects.get("on_evaluation")
    base = getattr(model, "name_or_path", None)
    config = replace(config, **names)
    for name in ("on_update", "on_evaluation"):
        if name in objects and not callable(objects[name]):
            raise UserError(f"{name} must be a function, got a {type(objects[name]).__name__}")
    config.check_complete()
    if "on_evaluation" in objects and not any(getattr(config, name, None) for name in EVALUATION_DATA):
        raise UserError("on_evaluation does nothing without eval_data or eval_prompts")
    require_names(config)
    return config, Given(data, rewards, *callbacks, program_goes_on=True, base=base)


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


def saved_model(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, config: StageConfig, until_the_end: ExitStack
) -> str:
    """Writes a loaded model to a temporary folder, from which the run loads its policy and its reference."""
    if not isinstance(model, PreTrainedModel):
        merged = ", whose merge_and_unload() gives one" if hasattr(model, "merge_and_unload") else ""
        kind = type(model).__name__
        raise UserError(f"model must be a transformers model or what --model takes, got a {kind}{merged}")
    if any(weight.is_meta for weight in model.parameters()):
        raise UserError("model has no weights: they are on the meta device")
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(f"tokenizer must be a transformers tokenizer, got a {type(tokenizer).__name__}")
    if isinstance(config, TrainableConfig) and config.lora_rank and config.lora_save == "adapter":
        raise UserError("lora_save='adapter' needs the name of a model: no folder keeps a loaded one, the base")
    if tokenizer is None:
        if not model.name_or_path:
            raise UserError("a model that was not loaded from anywhere needs its tokenizer=")
        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    quiet_libraries()
    place = Path(until_the_end.enter_context(TemporaryDirectory(prefix="fastp3o-")))
    # The name stands in the cards of saved models.
    folder = str(place / (Path(model.name_or_path or "").name or type(model).__name__))
    # The other processes take the weights from the main one.
    if os.environ.get("RANK", "0") == "0":
        try:
            model.save_pretrained(folder)
        except ValueError as error:  # such as a generation configuration that contradicts itself
            raise UserError(f"model cannot be saved for the run: {' '.join(str(error).split())}") from error
    else:
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_model(folder: Path) -> PreTrainedModel:
    """Loads a saved model. Where a run has saved the adapter alone, transformers loads the base and attaches it."""
    if (folder / CONFIG_NAME).exists():
        scores = json.loads((folder / CONFIG_NAME).read_text())["architectures"][0].endswith(CLASSIFIER)
    else:
        folder = folder.with_name(ADAPTER) if folder.name == FINISHED_MODEL else folder / ADAPTER
        scores = json.loads((folder / ADAPTER_CONFIG_NAME).read_text())["task_type"] == "SEQ_CLS"
    if scores:
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    return AutoModelForCausalLM.from_pretrained(folder)
