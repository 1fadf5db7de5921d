"""A configuration and objects to a finished run."""

import signal
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

from fastp3o.api.objects import Objects, resolved
from fastp3o.api.result import Result
from fastp3o.api.surroundings import run_surroundings
from fastp3o.config import StageConfig
from fastp3o.errors import UserError
from fastp3o.given import Given
from fastp3o.objectives.config import OnlineConfig
from fastp3o.objectives.preferences import PreferenceConfig
from fastp3o.stages import online, preference, reward_model, sft
from fastp3o.stages.config import RewardModelConfig, SFTConfig
from fastp3o.training.stopping import StoppedError


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
        until_the_end.enter_context(run_surroundings())
        stage = stage_of(config)
        config, given = resolved(config, objects, until_the_end)
        try:
            stage(config, given)
        except StoppedError as stopped:
            # A notebook keeps the last traceback, and with it the models of the frames.
            traceback.clear_frames(stopped.__traceback__)
            if stopped.number != signal.SIGINT:
                raise
            raise KeyboardInterrupt(f"{stopped.place}; resume=True goes on from there") from None
    return Result(Path(config.output_dir))


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
