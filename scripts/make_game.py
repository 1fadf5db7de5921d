"""Writes a game of several turns, and is its environment: find a hexadecimal digit of a range in
four guesses, told "higher" or "lower".

plays.jsonl has demonstrations of players who guess at random, mostly among what is left;
starts.jsonl and new_starts.jsonl have ranges with digits to find, a fifth of the ranges in the
second alone. `make_game:Guess` is the environment.
"""

import json
import random
from math import log2
from pathlib import Path
from typing import ClassVar

from fastp3o.cli import parse
from fastp3o.config import Flags, option, required
from fastp3o.files import write_file
from fastp3o.script import run_script

DIGITS = "0123456789abcdef"
SMALLEST = 8  # digits of a range
TURNS = 4


class Guess:
    """Answers > or < until the digit is found. found: whether it is. bits: what an answer excludes,
    as a share of what the range leaves open; a game that finds the digit has 1 in all. invalid:
    turns that are no digit, only counted.
    """

    rewards: ClassVar = {"found": 1.0, "bits": 1.0, "invalid": 0.0}

    def reset(self, low: str, high: str, secret: str) -> None:
        self.low, self.high, self.secret = map(DIGITS.index, (low, high, secret))
        self.bits = log2(self.high - self.low + 1)

    def step(self, text: str) -> tuple[str | None, dict[str, float], bool]:
        word = text.strip()
        if len(word) != 1 or word not in DIGITS:
            return "?\n", {"invalid": 1.0}, False
        guess, before = DIGITS.index(word), self.high - self.low + 1
        if guess == self.secret:
            return None, {"found": 1.0, "bits": log2(before) / self.bits}, True
        if guess < self.secret:
            self.low, answer = max(self.low, guess + 1), ">\n"
        else:
            self.high, answer = min(self.high, guess - 1), "<\n"
        return answer, {"bits": log2(before / (self.high - self.low + 1)) / self.bits}, False


class GameConfig(Flags):
    """Demonstrations of random play, and digits to find."""

    output_dir: str = required("Folder to write plays.jsonl, starts.jsonl and new_starts.jsonl to.")
    plays: int = option(4000, "Number of demonstrations.", at_least=1)
    seed: int = option(
        0, "Seed of the demonstrations, and of the choice of new ranges.", at_least=0
    )


def play(draw: random.Random, start: dict[str, str]) -> str:
    """A game: guesses and answers, a line each."""
    game, text = Guess(), ""
    game.reset(start["low"], start["high"], start["secret"])
    whole = DIGITS[game.low : game.high + 1]
    for _ in range(TURNS):
        guess = draw.choice(DIGITS[game.low : game.high + 1] if draw.random() < 0.8 else whole)
        answer, _, done = game.step(guess)
        text += f"{guess}\n{answer or ''}"
        if done:
            break
    return text


def main(config: GameConfig) -> None:
    draw, folder = random.Random(config.seed), Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    ranges = [
        DIGITS[low : low + size]
        for size in range(SMALLEST, len(DIGITS) + 1)
        for low in range(len(DIGITS) - size + 1)
    ]
    draw.shuffle(ranges)
    starts, new_starts = (
        [
            {
                "prompt": f"{digits[0]} to {digits[-1]}:\n",
                "low": digits[0],
                "high": digits[-1],
                "secret": secret,
            }
            for digits in part
            for secret in digits
        ]
        for part in (ranges[len(ranges) // 5 :], ranges[: len(ranges) // 5])
    )
    played = draw.choices(starts, k=config.plays)
    plays = [{"prompt": start["prompt"], "label": play(draw, start)} for start in played]
    for name, records in (("plays", plays), ("starts", starts), ("new_starts", new_starts)):
        write_file(
            folder / f"{name}.jsonl", "".join(json.dumps(record) + "\n" for record in records)
        )
    print(
        f"{len(plays)} games of random play, {len(starts)} starts and {len(new_starts)} of other ranges: {folder}"
    )


if __name__ == "__main__":
    run_script(lambda: main(parse(GameConfig)))
