"""The command `fastp3o COMMAND ...`, also as `python -m fastp3o COMMAND ...` and under torchrun."""

import gc
import sys
from importlib import import_module
from typing import Any

from fastp3o import __version__
from fastp3o.errors import naming_the_extra
from fastp3o.script import run_script

COMMANDS = {
    "sft": "fine-tuning on demonstrations",
    "reward": "a reward model from comparisons",
    "p3o": "P3O, online",
    "online": "any online objective: P3O, GRPO, RLOO, online DPO, ...",
    "ppo": "PPO",
    "online_dpo": "online DPO",
    "preference": "DPO, KTO and related objectives, on offline data",
    "generate": "sampled responses, kept by their rewards, as data",
    "evaluate": "rewards of a model's samples, without training",
    "win_rate": "win rates of models against each other",
    "rollouts": "best and worst responses of a run's updates",
    "frontier": "reward against KL of runs",
    "compare": "runs side by side: options, evaluations, curves, answers; or two sets of runs at equal KL",
    "report": "one HTML file of runs, to look at and to search",
    "chat": "talk to a model, or to two side by side",
    "memory": "the GPU memory that a run will take",
}
# Commands that only read options: a configuration, or one for each `--objective`; and the function
# of them. The others are files of commands/.
STAGES = {
    "sft": ("training.config:SFTConfig", "training.sft:train"),
    "reward": ("training.config:RewardModelConfig", "training.reward_model:train"),
    "p3o": ("objectives.config.p3o:P3OConfig", "training.loop:train"),
    "online": ("objectives.config.online:OBJECTIVES", "training.loop:train"),
    "ppo": ("objectives.config.ppo:PPOConfig", "training.loop:train"),
    "online_dpo": ("objectives.config.preferences:OnlineDPOConfig", "training.loop:train"),
    "preference": (
        "objectives.config.preferences:OFFLINE_OBJECTIVES",
        "training.preferences:train",
    ),
    "generate": ("generate.config:GenerateConfig", "generate.loop:generate"),
}
OBJECTIVE_COMMANDS = (
    "An objective is a command, too: fastp3o grpo is fastp3o online --objective grpo."
)


def main() -> None:
    """Runs the command that the first argument of the process names, on the others."""
    asked = sys.argv[1].replace("-", "_") if sys.argv[1:] else ""
    if asked == "__version":
        print(f"fastp3o {__version__}")
        sys.exit()
    command = asked if asked in COMMANDS else stage_of_objective(asked)
    if not command:
        width = max(map(len, COMMANDS))
        lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
        known = asked in ("", "__help")
        problem = [] if known else [f"unknown command {sys.argv[1]}"]
        file = sys.stdout if asked == "__help" else sys.stderr
        print(
            "usage: fastp3o COMMAND [--help]",
            *lines,
            OBJECTIVE_COMMANDS,
            *problem,
            sep="\n",
            file=file,
        )
        sys.exit(0 if asked == "__help" else 2)
    chosen = [] if command == asked else [f"--objective={asked}"]
    sys.argv[:2] = [f"fastp3o {asked}", *chosen]

    def run() -> None:
        with naming_the_extra():
            from fastp3o.cli import parse, parse_chosen

        chosen, action = imported(STAGES[command][0]), STAGES[command][1]
        of_function = (
            imported("objectives.config.function:FunctionConfig") if command == "online" else None
        )
        config = (
            parse_chosen(chosen, of_function=of_function)
            if isinstance(chosen, dict)
            else parse(chosen)
        )
        # Its import takes seconds, and makes objects that stay: collecting garbage meanwhile adds a
        # third.
        gc.disable()
        act = imported(action)
        gc.freeze()
        gc.enable()
        act(config)

    run_script(run if command in STAGES else imported(f"commands.{command}:main"))


def stage_of_objective(name: str) -> str:
    """The command that trains with an objective, "" if there is none of this name."""
    if not name.isidentifier():
        return ""
    return next(
        (stage for stage in ("online", "preference") if name in imported(STAGES[stage][0])), ""
    )


def imported(place: str) -> Any:
    """The object that `module:name` says, of a module of this package."""
    module, _, name = place.partition(":")
    with naming_the_extra():
        return getattr(import_module(f"fastp3o.{module}"), name)


if __name__ == "__main__":
    main()
