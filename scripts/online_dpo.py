"""Online DPO, to compare P3O with. `python scripts/online_dpo.py --help` explains every option."""

from fastp3o.cli import parse
from fastp3o.objectives.preferences import OnlineDPOConfig
from fastp3o.script import run_script


def main() -> None:
    config = parse(OnlineDPOConfig)
    from fastp3o.training.loop import train  # takes seconds, which --help does without

    train(config)


if __name__ == "__main__":
    run_script(main)
