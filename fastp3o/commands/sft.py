"""Stage 1, supervised fine-tuning. `fastp3o sft --help` explains every option."""

from fastp3o.cli import parse
from fastp3o.training.config import SFTConfig


def main() -> None:
    config = parse(SFTConfig)
    from fastp3o.training.sft import train  # takes seconds, which --help does without

    train(config)
