"""Stage 3, P3O. `python scripts/p3o.py --help` explains every option."""

from fastp3o.cli import parse
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.script import run_script


def main() -> None:
    config = parse(P3OConfig)
    from fastp3o.training.loop import train  # takes seconds, which --help does without

    train(config)


if __name__ == "__main__":
    run_script(main)
