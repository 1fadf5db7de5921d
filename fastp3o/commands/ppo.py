"""PPO, to compare P3O with. `fastp3o ppo --help` explains every option."""

from fastp3o.cli import parse
from fastp3o.objectives.ppo import PPOConfig


def main() -> None:
    config = parse(PPOConfig)
    from fastp3o.training.loop import train  # takes seconds, which --help does without

    train(config)
