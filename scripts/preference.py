"""DPO, KTO and their kin. `python scripts/preference.py --objective dpo --help` explains every option."""

from fastp3o.cli import parse_chosen
from fastp3o.objectives.preferences import OFFLINE_OBJECTIVES
from fastp3o.script import run_script


def main() -> None:
    config = parse_chosen(OFFLINE_OBJECTIVES)
    from fastp3o.training.preferences import train  # takes seconds, which --help does without

    train(config)


if __name__ == "__main__":
    run_script(main)
