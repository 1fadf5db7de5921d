"""DPO, KTO and their kin. `fastp3o preference --objective dpo --help` explains every option."""

from fastp3o.cli import parse_chosen
from fastp3o.objectives.preferences import OFFLINE_OBJECTIVES


def main() -> None:
    config = parse_chosen(OFFLINE_OBJECTIVES)
    from fastp3o.training.preferences import train  # takes seconds, which --help does without

    train(config)
