"""Stage 2, reward modelling. `fastp3o reward --help` explains every option."""

from fastp3o.cli import parse
from fastp3o.training.config import RewardModelConfig


def main() -> None:
    config = parse(RewardModelConfig)
    from fastp3o.training.reward_model import train  # takes seconds, which --help does without

    train(config)
