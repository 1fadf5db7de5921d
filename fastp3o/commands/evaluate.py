"""Rewards of a model's samples, without training. `fastp3o evaluate --help` explains every option.

fastp3o evaluate --model runs/sft/model --prompts eval.jsonl --reward runs/rm/model,checks:right_answer --greedy

With several responses to each prompt it also says how large the offsets of prompts are beside the
spread within one:
fastp3o evaluate --model runs/sft/model --prompts eval.jsonl --reward runs/rm/model --responses_per_prompt 4
"""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastp3o.cli import parse
from fastp3o.commands.win_rate import require_place
from fastp3o.errors import visible
from fastp3o.evaluation.config import EvaluateConfig

SHOWN = 5  # samples


def main() -> None:
    config = parse(EvaluateConfig)
    # These take seconds, which --help does without.
    import torch
    from transformers.utils.logging import disable_progress_bar

    from fastp3o.evaluation.evaluate import lengths_and_ends
    from fastp3o.evaluation.interval import half_width
    from fastp3o.evaluation.offsets import spread
    from fastp3o.evaluation.win_rates import prompts_for, respond
    from fastp3o.files import write_file
    from fastp3o.models.tokenizer import load_tokenizer
    from fastp3o.run.log import prompt_end

    disable_progress_bar()
    settings = config.with_values(top_k=1, greedy=False) if config.greedy else config
    if config.output:
        require_place(Path(config.output))
    tokenizer = load_tokenizer(config.model, **config.tokenizer_options)
    responses = respond(config.model, tokenizer, prompts_for(tokenizer, settings), settings)
    means = {}
    title = f"{config.model}, {len(responses.groups)} prompts{', greedy' if config.greedy else ''}"
    table = Table(
        "", "mean", "± (95%, over prompts)", "SD within prompts", "offset / SD within", title=title
    )
    for name, value in (responses.rewards | lengths_and_ends(responses.groups)).items():
        of_prompts = value.double().mean(dim=1).numpy()
        half = half_width(of_prompts - of_prompts.mean(), len(of_prompts) - 1)
        means[name] = {"mean": float(of_prompts.mean()), "interval": half}
        spreads: tuple[str, ...] = ()
        if name in responses.rewards and (parts := spread(value)):
            means[name] |= {"within": parts.within, "offset": parts.offset}
            spreads = f"{parts.within:.3g}", f"{parts.ratio:.2f}"
        table.add_row(name, f"{means[name]['mean']:.4g}", f"{half:.2g}", *spreads)
    samples = Table("prompt", "response", *responses.rewards, title="samples")
    for number in (
        torch.linspace(0, len(responses.groups) - 1, min(SHOWN, len(responses.groups)))
        .long()
        .tolist()
    ):
        group = responses.groups[number]
        scores = [f"{value[number, 0]:.3g}" for value in responses.rewards.values()]
        texts = visible(prompt_end(group.prompt.text)), visible(group.responses[0].text.strip())
        samples.add_row(*map(Text, texts), *scores)
    Console().print(samples)
    Console().print(table)
    if config.output:
        write_file(Path(config.output), json.dumps(means, indent=1) + "\n")
