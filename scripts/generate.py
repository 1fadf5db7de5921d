"""Sampling without training: responses kept by their rewards. `python scripts/generate.py --help` explains all options.

python scripts/generate.py --model runs/sft/model --reward runs/rm/model --prompts data.jsonl --output_dir runs/best
"""

from fastp3o.cli import parse
from fastp3o.generate.config import GenerateConfig
from fastp3o.script import run_script


def main() -> None:
    config = parse(GenerateConfig)
    from fastp3o.generate.loop import generate  # takes seconds, which --help does without

    generate(config)


if __name__ == "__main__":
    run_script(main)
