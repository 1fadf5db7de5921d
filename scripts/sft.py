"""Stage 1, supervised fine-tuning. `python scripts/sft.py --help` explains every option."""

from fastp3o.config import parse
from fastp3o.script import run_script
from fastp3o.stages.sft import SFTConfig, train

if __name__ == "__main__":
    run_script(lambda: train(parse(SFTConfig)))
