"""Sampling without training: responses kept by their rewards. `fastp3o generate --help` explains all options.

fastp3o generate --model runs/sft/model --reward runs/rm/model --prompts data.jsonl --output_dir runs/best
"""

from fastp3o.cli import parse
from fastp3o.generate.config import GenerateConfig


def main() -> None:
    config = parse(GenerateConfig)
    from fastp3o.generate.loop import generate  # takes seconds, which --help does without

    generate(config)
