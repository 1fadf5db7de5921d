"""Sums that are added up step by step: a verifiable task of long responses with a reward of 0 or 1.

The prompt has four to six numbers of two digits, each digit under a letter of its own: "a 3 A 7 b 4
B 5 c 1 C 9 ... =". The response adds one number after the other to the sum so far, units and then
tens, each result with its carry:

    then B 5 + 7 = 1 2 , b 4 + 3 + 1 = 0 8 , 0 8 2 ; now C 9 + 2 = 1 1 , c 1 + 8 + 1 = 1 0 , 1 0 1 ; ...

These are 23 tokens a number, so responses have 70, 93 or 116 with their end. The first word says
nothing, and is one of four by chance: a response has several ways of being right, as a text has.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.frontier.tasks import synthetic
from fastp3o.rollouts.groups import Group, texts
from fastp3o.training import sft
from fastp3o.training.sft import SFTConfig

LETTERS, FILLERS = "abcdef", ["add", "take", "now", "then"]
VOCABULARY = [*LETTERS, *LETTERS.upper(), *"0123456789+=,;", *FILLERS]
COUNTS = 4, 6  # of numbers, least and most
LENGTHS = {"max_prompt_tokens": 26, "max_response_tokens": 128}

SIZES = {"sft": 16_000, "prompts.train": 6_400, "prompts.eval": 256}
SLIPS = 0.1  # share of the results in demonstrations
SFT: dict[str, Any] = synthetic.SFT | LENGTHS | {"epochs": 1, "batch_size": 16}


def make_prompt(numbers: list[int]) -> str:
    digits = [
        f"{a} {number // 10} {a.upper()} {number % 10}"
        for a, number in zip(LETTERS, numbers, strict=False)
    ]
    return f"{' '.join(digits)} ="


def numbers_of(prompt: str) -> list[int]:
    digits = prompt.split()[1::2]
    return [int(tens + units) for tens, units in zip(digits[::2], digits[1::2], strict=True)]


def spaced(number: int, digits: int) -> str:
    return " ".join(f"{number:0{digits}}")


def slip(result: int, rng: np.random.Generator) -> int:
    """The result, or one with a last digit by chance."""
    return result - result % 10 + int(rng.integers(10)) if rng.random() < SLIPS else result


def steps(prompt: str, rng: np.random.Generator) -> str:
    """The demonstration of a teacher who slips, and goes on from what is written."""
    total, *others = numbers_of(prompt)
    written = []
    for letter, number in zip(LETTERS[1:], others, strict=False):
        more_tens, more_units = divmod(number, 10)
        units = slip(total % 10 + more_units, rng)
        written += [
            f"{rng.choice(FILLERS)} {letter.upper()} {more_units} + {total % 10} = {spaced(units, 2)} ,"
        ]
        tens = slip(total // 10 % 10 + more_tens + units // 10, rng)
        sums = f"{letter} {more_tens} + {total // 10 % 10} + {units // 10} = {spaced(tens, 2)}"
        total = slip(total // 100 * 100 + 10 * tens + units % 10, rng)
        written += [f"{sums} , {spaced(total, 3)} ;"]
    return " ".join(written)


def is_right(prompt: str, response: str) -> bool:
    """Whether the response ends with the sum."""
    return response.endswith(f", {spaced(sum(numbers_of(prompt)), 3)} ;")


def scores(prompts: list[str], responses: list[str]) -> list[float]:
    """1 for a right response, else 0."""
    return [float(is_right(*pair)) for pair in zip(prompts, responses, strict=True)]


def reward(groups: list[Group]) -> Tensor:
    """The same of groups, [P, K]."""
    right = scores(*texts(groups))
    return torch.tensor(right, dtype=torch.float32).view(len(groups), -1)


def make(folder: Path, seed: int) -> None:
    """Writes prompts and, in policy/, a model that imitates the teacher, slips included; no prompt
    occurs twice.
    """
    rng = np.random.default_rng([seed, 2])
    prompts: dict[str, None] = {}
    while len(prompts) < sum(SIZES.values()):
        prompts[
            make_prompt(rng.integers(10, 100, rng.integers(COUNTS[0], COUNTS[1] + 1)).tolist())
        ] = None
    left, files = iter(prompts), {part: str(folder / f"{part}.jsonl") for part in SIZES}
    folder.mkdir(parents=True, exist_ok=True)
    for part, size in SIZES.items():
        records = [{"prompt": prompt} for prompt in islice(left, size)]
        if part == "sft":
            records = [record | {"label": steps(record["prompt"], rng)} for record in records]
        synthetic.write_jsonl(Path(files[part]), records)
    tokenizer = synthetic.make_tokenizer(VOCABULARY)
    init = str(folder / "init")
    output = str(folder / "sft")
    tokenizer.save_pretrained(init)
    synthetic.make_model(tokenizer, seed, inner=160).save_pretrained(init)
    sft.train(SFTConfig(model=init, output_dir=output, train_data=files["sft"], seed=seed, **SFT))
    (folder / "sft" / "model").rename(folder / "policy")
