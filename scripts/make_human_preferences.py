"""Splits Anthropic's human comparisons of harmlessness (hh-rlhf, harmless-base/test.jsonl.gz, MIT
license) into what each stage of human_preferences.sh reads: conversations of people with an
assistant, each with the answer that a person chose and the one that the person rejected. Many of
the conversations are hateful: people asked for harmful things to see what an assistant answers.

    python scripts/make_human_preferences.py --output_dir runs/human_preferences/data

Four sets, no two of which share an opening question: sft.jsonl (prompts and chosen answers),
reward.jsonl and judge.jsonl (comparisons for two reward models that learn from different people's
choices), and held_out.jsonl (comparisons on which reward models and the trained policy are
measured).
"""

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pinned_file import pinned_file

from fastp3o.cli import parse
from fastp3o.config import Flags, option, required
from fastp3o.errors import UserError
from fastp3o.script import run_script

URLS = (
    "https://huggingface.co/datasets/Anthropic/hh-rlhf/resolve/main/harmless-base/test.jsonl.gz",
    "https://github.com/anthropics/hh-rlhf/raw/master/harmless-base/test.jsonl.gz",
)
SHA256 = "ebfaaed21162a4de120ae85366075b34425e2a6303fac59b99555002f7016f03"
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


class HumanPreferencesConfig(Flags):
    """Where the comparisons come from, how many each set gets, and how long they may be."""

    output_dir: str = required("Folder for the four JSON Lines files.")
    file: str | None = option(
        None,
        "Copy of harmless-base/test.jsonl.gz. Default: downloaded (0.7 MB), from the Hugging Face hub or GitHub.",
    )
    held_out: int = option(96, "Number of comparisons that no stage trains on.", at_least=1)
    sft: int = option(
        224, "Number of prompts with the chosen answers, for fine-tuning and P3O.", at_least=1
    )
    comparisons: int = option(
        416, "Number of comparisons for each of the two reward models.", at_least=1
    )
    prompt_words: int = option(
        128, "Maximum length of a conversation before its answer, in words.", at_least=1
    )
    answer_words: int = option(56, "Maximum length of an answer, in words.", at_least=1)
    seed: int = option(0, "Seed of the split.", at_least=0)


class Comparison(NamedTuple):
    """prompt: the conversation up to and with "Assistant:". chosen, rejected: what follows, with
    its first space.
    """

    prompt: str
    chosen: str
    rejected: str

    @property
    def words(self) -> int:
        return len(self.prompt.split()) + max(len(self.chosen.split()), len(self.rejected.split()))

    @property
    def opening(self) -> str:
        return self.prompt.partition(ASSISTANT)[0].strip()


def main(config: HumanPreferencesConfig) -> None:
    copy = None if config.file is None else Path(config.file)
    content = pinned_file(URLS, SHA256, copy, "--file")
    everything = list(read(content))
    fitting = [one for one in everything if fits(one, config)]
    numbers = {
        "held_out": config.held_out,
        "sft": config.sft,
        "reward": config.comparisons,
        "judge": config.comparisons,
    }
    sets = split(fitting, numbers, config.seed)
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, comparisons in sets.items():
        write(folder / f"{name}.jsonl", comparisons, with_rejected=name != "sft")
    counted = ", ".join(f"{len(comparisons)} in {name}.jsonl" for name, comparisons in sets.items())
    print(
        f"{len(everything)} comparisons of people, {len(fitting)} of them short enough: {counted}"
    )


def read(content: bytes) -> Iterator[Comparison]:
    """Comparisons of two different answers, neither empty, to one conversation: 2,303 of the file's
    2,312.
    """
    for line in gzip.decompress(content).decode().splitlines():
        record = json.loads(line)
        (prompt, chosen), (other, rejected) = (
            parted(record[name]) for name in ("chosen", "rejected")
        )
        if prompt == other and chosen.strip() and rejected.strip() and chosen != rejected:
            yield Comparison(prompt, chosen, rejected)


def parted(conversation: str) -> tuple[str, str]:
    end = conversation.rindex(ASSISTANT) + len(ASSISTANT)
    return conversation[:end], conversation[end:]


def fits(comparison: Comparison, config: HumanPreferencesConfig) -> bool:
    answers = (comparison.chosen, comparison.rejected)
    short = all(len(answer.split()) <= config.answer_words for answer in answers)
    return short and len(comparison.prompt.split()) <= config.prompt_words


def split(
    comparisons: list[Comparison], numbers: dict[str, int], seed: int
) -> dict[str, list[Comparison]]:
    """Sets of these sizes, no two of which share an opening. The held-out and the fine-tuning set
    get the shortest comparisons, for these are answered, and the others only read. Raises UserError
    if there are too few.
    """
    by_opening: dict[str, list[Comparison]] = {}
    for comparison in sorted(comparisons, key=lambda one: one.words):
        by_opening.setdefault(comparison.opening, []).append(comparison)
    openings = list(by_opening.values())
    answered = numbers["held_out"] + numbers["sft"]
    shuffled = openings[:answered], openings[answered : sum(numbers.values())]
    for part in shuffled:
        random.Random(seed).shuffle(part)
    left = iter([one for part in shuffled for one in part])
    sets: dict[str, list[Comparison]] = {}
    for name, number in numbers.items():
        chosen: list[Comparison] = []
        while len(chosen) < number:
            group = next(left, None)
            if group is None:
                raise UserError(
                    f"{len(comparisons)} comparisons are too few for {sum(numbers.values())}"
                )
            chosen += group
        sets[name] = chosen[:number]
    return sets


def write(path: Path, comparisons: list[Comparison], with_rejected: bool) -> None:
    with path.open("w", encoding="utf-8") as file:
        for one in comparisons:
            record = {"prompt": one.prompt, "chosen": one.chosen, "rejected": one.rejected}
            if not with_rejected:
                record = {"prompt": one.prompt, "response": one.chosen}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run_script(lambda: main(parse(HumanPreferencesConfig)))
