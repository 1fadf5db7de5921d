"""Stage 3, P3O. `fastp3o p3o --help` explains every option."""

from fastp3o.cli import parse
from fastp3o.objectives.p3o import P3OConfig


def main() -> None:
    config = parse(P3OConfig)
    from fastp3o.training.loop import train  # takes seconds, which --help does without

    train(config)
