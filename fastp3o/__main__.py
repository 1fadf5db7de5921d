"""The command `fastp3o COMMAND ...`, also as `python -m fastp3o COMMAND ...` and under torchrun."""

import sys
from importlib import import_module

from fastp3o.script import run_script

COMMANDS = {
    "sft": "fine-tuning on demonstrations",
    "reward": "a reward model from comparisons",
    "p3o": "P3O, online",
    "online": "any online objective: P3O, GRPO, RLOO, online DPO and their kin",
    "ppo": "PPO",
    "online_dpo": "online DPO",
    "preference": "DPO, KTO and their kin, on fixed data",
    "generate": "sampled responses, kept by their rewards, as data",
    "evaluate": "rewards of a model's samples, without training",
    "win_rate": "win rates of models against each other",
    "rollouts": "best and worst responses of a run's updates",
    "frontier": "reward against KL of runs",
    "compare": "two sets of runs at equal KL",
    "memory": "the GPU memory that a run will take",
}


def main(command: str | None = None) -> None:
    """Runs a command on the arguments of the process. command: by default the first of them."""
    if command is None:
        asked = sys.argv[1].replace("-", "_") if sys.argv[1:] else ""
        if asked not in COMMANDS:
            width = max(map(len, COMMANDS))
            lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
            print(
                "usage: fastp3o COMMAND [--help]",
                *lines,
                sep="\n",
                file=sys.stdout if asked == "__help" else sys.stderr,
            )
            sys.exit(0 if asked == "__help" else 2)
        sys.argv[:2] = [f"fastp3o {asked}"]
        command = asked
    run_script(import_module(f"fastp3o.commands.{command}").main)


if __name__ == "__main__":
    main()
