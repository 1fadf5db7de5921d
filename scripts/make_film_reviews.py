"""Splits sentences of film reviews, labeled positive or negative, into what each stage of
film_reviews.sh reads. They are the sentence polarity data set 1.0 of Pang and Lee (2005,
https://www.cs.cornell.edu/people/pabo/movie-review-data/): snippets of Rotten Tomatoes, in lower
case, published for research without a license. The two files come from a repository of others,
https://github.com/dennybritz/cnn-text-classification-tf.

    python scripts/make_film_reviews.py --output_dir runs/film_reviews/data

A sentence is in one of four sets. held_out.jsonl, reward.jsonl and gold.jsonl have pairs, a
positive sentence chosen before a negative one, which share no more than the prompt "Film review:".
sft.jsonl has the beginnings of other sentences with what follows, and prompts.jsonl the beginnings
of those that are held out. A beginning ends inside a sentence, so that a policy decides how it goes
on: "Film review: the story is so" has to become one thing or the other.
"""

import json
import random
from pathlib import Path
from typing import Any

from pinned_file import pinned_file

from fastp3o.cli import parse
from fastp3o.config import Flags, option, required
from fastp3o.errors import UserError
from fastp3o.files import write_file
from fastp3o.script import run_script

FOLDER = "https://github.com/dennybritz/cnn-text-classification-tf/raw/master/data/rt-polaritydata"
SHA256 = {
    "rt-polarity.pos": "4134882974a28d0c7b5151256f0e33a6169984ee7372c279e673f1114f475d58",
    "rt-polarity.neg": "2d11cfbc790f1cd96d78339f41ce53ced1efa83cd22d37d6788fa3fe3d17e2fd",
}
PROMPT = "Film review:"


class FilmReviewsConfig(Flags):
    """Where the sentences come from, and how many and which of them the policy meets."""

    output_dir: str = required("Folder for the five JSON Lines files.")
    folder: str | None = option(
        None,
        "Folder with copies of rt-polarity.pos and rt-polarity.neg. Default: downloaded from GitHub (1.2 MB).",
    )
    held_out: int = option(
        128, "Number of sentences of each label that no stage trains on.", at_least=1
    )
    sft: int = option(128, "Number of sentences of each label for fine-tuning and P3O.", at_least=1)
    beginning_words: int = option(4, "Length of a beginning, in words.", at_least=1)
    words: int = option(
        20, "Maximum length of a sentence that is held out or fine-tuned on, in words.", at_least=2
    )
    seed: int = option(0, "Seed of the split.", at_least=0)


def main(config: FilmReviewsConfig) -> None:
    positive, negative = (read(name, config) for name in SHA256)
    sets = {
        name: list(zip(chosen, rejected, strict=True))
        for (name, chosen), rejected in zip(
            split(positive, config).items(), split(negative, config).values(), strict=True
        )
    }
    fine_tuning, held_out = (
        [sentence for pair in sets[name] for sentence in pair] for name in ("sft", "held_out")
    )
    files = {name: [pair(*both) for both in sets[name]] for name in ("held_out", "reward", "gold")}
    files["sft"] = [begun(sentence, config.beginning_words) for sentence in fine_tuning]
    files["prompts"] = [
        {"prompt": begun(sentence, config.beginning_words)["prompt"]} for sentence in held_out
    ]
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in files.items():
        write(folder / f"{name}.jsonl", records)
    counted = ", ".join(f"{len(records)} in {name}.jsonl" for name, records in files.items())
    print(f"{len(positive) + len(negative)} sentences of film reviews: {counted}")


def read(name: str, config: FilmReviewsConfig) -> list[str]:
    """The sentences of a file, none of them twice."""
    copy = None if config.folder is None else Path(config.folder) / name
    content = pinned_file((f"{FOLDER}/{name}",), SHA256[name], copy, "--folder")
    return list(dict.fromkeys(line.strip() for line in content.decode().splitlines()))


def split(sentences: list[str], config: FilmReviewsConfig) -> dict[str, list[str]]:
    """The sets of one label's sentences. The policy meets those that a beginning leaves at least
    as much of, and that fit into a short response; the reward model and the gold get half of the
    others each. Raises UserError if there are too few.
    """
    shuffled = random.Random(config.seed).sample(sentences, len(sentences))
    met = [
        one for one in shuffled if 2 * config.beginning_words <= len(one.split()) <= config.words
    ][: config.held_out + config.sft]
    left = [one for one in shuffled if one not in set(met)]
    if len(met) < config.held_out + config.sft or len(left) < 2:
        raise UserError(
            f"{len(sentences)} sentences of a label, {len(met)} of them of {2 * config.beginning_words} to "
            f"{config.words} words, are too few: --held_out {config.held_out} and --sft {config.sft} take "
            f"{config.held_out + config.sft} of these, and the reward model and the gold at least one more each"
        )
    half = len(left) // 2
    return {
        "held_out": met[: config.held_out],
        "sft": met[config.held_out :],
        "reward": left[:half],
        "gold": left[half : 2 * half],
    }


def pair(positive: str, negative: str) -> dict[str, str]:
    return {"prompt": PROMPT, "chosen": f" {positive}", "rejected": f" {negative}"}


def begun(sentence: str, beginning_words: int) -> dict[str, str]:
    words = sentence.split()
    beginning, rest = words[:beginning_words], words[beginning_words:]
    return {"prompt": " ".join((PROMPT, *beginning)), "response": f" {' '.join(rest)}"}


def write(path: Path, records: list[dict[str, Any]]) -> None:
    write_file(path, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records))


if __name__ == "__main__":
    run_script(lambda: main(parse(FilmReviewsConfig)))
