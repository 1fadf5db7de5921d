"""Writes the quickstart's world: stories in plain words, comparisons by raters with a hidden taste,
an untrained Llama.

A prompt names a character, and a story has one to three sentences. Raters like cheerful words,
stories of the character that was asked for, and short ones. They compare two stories as people do,
with mistakes: P(a over b) = σ(taste(a) − taste(b)). No stage sees the taste itself, and no other
file has the prompts of the evaluation.
"""

import json
import math
import random
from itertools import product
from pathlib import Path

from fastp3o.cli import parse
from fastp3o.config import Flags, option, required
from fastp3o.files import write_file
from fastp3o.script import run_script

CHARACTERS = ("dog", "cat", "child", "farmer", "sailor", "teacher", "bird", "fox", "baker", "king")
# Words by what raters feel about them: good, bad, neither.
ADJECTIVES = (
    "happy kind brave merry gentle",
    "angry tired sick cruel lonely",
    "old young tall small quiet",
)
VERBS = ("sings dances laughs plays", "cries falls fights hides", "walks waits works sits")
PLACES = ("sun garden meadow", "rain dark mud", "house street forest")
VALUES = {
    word: value
    for kind in (ADJECTIVES, VERBS, PLACES)
    for value, words in zip((1, -1), kind, strict=False)
    for word in words.split()
}
HELD_OUT = 30  # of the 150 prompts
END, PAD = "<end>", "<pad>"


class StoriesConfig(Flags):
    """Demonstrations, comparisons, prompts and an untrained model."""

    output_dir: str = required("Folder for the files, and for model and tokenizer in init/.")
    demonstrations: int = option(6000, "Number of stories to fine-tune on.", at_least=1)
    comparisons: int = option(8000, "Number of pairs of stories that raters compared.", at_least=1)
    seed: int = option(0, "Seed of stories, raters and weights.", at_least=0)


def taste(prompts: list[str], responses: list[str]) -> list[float]:
    """What raters feel about stories: a reward function, which no stage of the quickstart trains
    on.
    """
    return [taste_of_story(*one) for one in zip(prompts, responses, strict=True)]


def taste_of_story(prompt: str, story: str) -> float:
    sentences = [sentence.split() for sentence in story.split(" and ")]
    cheerful = sum(VALUES.get(word, 0) for sentence in sentences for word in sentence) / len(
        sentences
    )
    on_topic = sum(character(prompt) in sentence for sentence in sentences) / len(sentences)
    return cheerful + 2 * on_topic - 1 - 0.5 * max(0, len(sentences) - 2)


def character(prompt: str) -> str:
    return prompt.split()[-2]


def make_story(prompt: str, lot: random.Random) -> str:
    """One to three sentences in any mood, most of them about the prompt's character."""

    def any_of(kind: tuple[str, ...]) -> str:
        return lot.choice(" ".join(kind).split())

    subjects = [
        character(prompt) if lot.random() < 0.7 else lot.choice(CHARACTERS)
        for _ in range(lot.choice((1, 2, 2, 3)))
    ]
    return " and ".join(
        f"the {any_of(ADJECTIVES)} {who} {any_of(VERBS)} in the {any_of(PLACES)}"
        for who in subjects
    )


def compare(prompt: str, lot: random.Random) -> dict[str, str]:
    """Two different stories, in the order of a rater who makes mistakes."""
    first = second = make_story(prompt, lot)
    while second == first:
        second = make_story(prompt, lot)
    difference = taste_of_story(prompt, first) - taste_of_story(prompt, second)
    if lot.random() > 1 / (1 + math.exp(-difference)):
        first, second = second, first
    return {"prompt": prompt, "chosen": first, "rejected": second}


def main(config: StoriesConfig) -> None:
    lot = random.Random(config.seed)
    kinds = " ".join(ADJECTIVES).split()
    prompts = [
        f"tell of the {kind} {character} :" for kind, character in product(kinds, CHARACTERS)
    ]
    lot.shuffle(prompts)
    unseen, seen = prompts[:HELD_OUT], prompts[HELD_OUT:]
    stories = [
        {"prompt": one, "completion": make_story(one, lot)}
        for one in lot.choices(seen, k=config.demonstrations)
    ]
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in {
        "stories": stories,
        "comparisons": [compare(one, lot) for one in lot.choices(seen, k=config.comparisons)],
        "comparisons.eval": [compare(one, lot) for one in lot.choices(unseen, k=400)],
        "prompts": [{"prompt": one} for one in seen],
        "prompts.eval": [{"prompt": one} for one in unseen],
    }.items():
        write_file(
            folder / f"{name}.jsonl", "".join(json.dumps(record) + "\n" for record in records)
        )
    make_model(folder / "init", config.seed)
    print(
        f"{len(stories)} stories and {config.comparisons} comparisons to {len(seen)} prompts; {len(unseen)} held out"
    )


def make_model(folder: Path, seed: int) -> None:
    """An untrained Llama of 0.2 million parameters whose tokens are words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    kinds = (*ADJECTIVES, *VERBS, *PLACES)
    words = [END, PAD, "tell", "of", "the", "and", "in", ":", *CHARACTERS, *" ".join(kinds).split()]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=PAD)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=words.index(END),
        pad_token_id=words.index(PAD),
    )
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    run_script(lambda: main(parse(StoriesConfig)))
