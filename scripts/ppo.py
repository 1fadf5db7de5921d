"""PPO, to compare P3O with. `python scripts/ppo.py --help` explains every option."""

from fastp3o.cli import parse
from fastp3o.objectives.ppo import PPOConfig
from fastp3o.script import run_script


def main() -> None:
    config = parse(PPOConfig)
    from fastp3o.training.loop import train  # takes seconds, which --help does without

    train(config)


if __name__ == "__main__":
    run_script(main)
