"""Online DPO, to compare P3O with. `fastp3o online_dpo --help` explains every option."""

from fastp3o.cli import parse
from fastp3o.objectives.preferences import OnlineDPOConfig


def main() -> None:
    config = parse(OnlineDPOConfig)
    from fastp3o.training.loop import train  # takes seconds, which --help does without

    train(config)
