"""Writes a game of several turns, and is its environment: find a hexadecimal digit in four guesses, told "higher" or
"lower".

plays.jsonl has demonstrations of players who guess at random, half of the time among what is left; secrets.jsonl has
digits to find. `make_game:Guess` is the environment.
"""

import json
import random
from math import log2
from pathlib import Path
from typing import ClassVar

from fastp3o.cli import parse
from fastp3o.config import Flags, option, options, required
from fastp3o.files import write_file
from fastp3o.script import run_script

DIGITS = "0123456789abcdef"
TURNS = 4
PROMPT = "guess:\n"


class Guess:
    """Answers > or < until the digit is found. found: whether it is. bits: what an answer excludes, in bits of the four
    that a digit has; a game that finds the digit has 1 in all. invalid: turns that are no digit, only counted.
    """

    rewards: ClassVar = {"found": 1.0, "bits": 1.0, "invalid": 0.0}

    def reset(self, secret: str) -> None:
        self.secret, self.low, self.high = DIGITS.index(secret), 0, len(DIGITS) - 1

    def step(self, text: str) -> tuple[str | None, dict[str, float], bool]:
        word = text.strip()
        if len(word) != 1 or word not in DIGITS:
            return "?\n", {"invalid": 1.0}, False
        guess, before = DIGITS.index(word), self.high - self.low + 1
        if guess == self.secret:
            return None, {"found": 1.0, "bits": log2(before) / 4}, True
        if guess < self.secret:
            self.low, answer = max(self.low, guess + 1), ">\n"
        else:
            self.high, answer = min(self.high, guess - 1), "<\n"
        return answer, {"bits": log2(before / (self.high - self.low + 1)) / 4}, False


@options
class GameConfig(Flags):
    """Demonstrations of random play, and digits to find."""

    output_dir: str = required("Folder of plays.jsonl and secrets.jsonl.")
    plays: int = option(4000, "Demonstrations.", at_least=1)
    seed: int = option(0, "Seed of the demonstrations.", at_least=0)


def play(draw: random.Random) -> str:
    """A game: guesses and answers, a line each."""
    game, text = Guess(), ""
    game.reset(draw.choice(DIGITS))
    for _ in range(TURNS):
        among = DIGITS[game.low : game.high + 1] if draw.random() < 0.5 else DIGITS
        guess = draw.choice(among)
        answer, _, done = game.step(guess)
        text += f"{guess}\n{answer or ''}"
        if done:
            break
    return text


def main(config: GameConfig) -> None:
    draw, folder = random.Random(config.seed), Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    plays = [{"prompt": PROMPT, "label": play(draw)} for _ in range(config.plays)]
    secrets = [{"prompt": PROMPT, "secret": digit} for digit in DIGITS]
    for name, records in (("plays", plays), ("secrets", secrets)):
        write_file(folder / f"{name}.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    print(f"{len(plays)} games of random play and {len(secrets)} digits to find: {folder}")


if __name__ == "__main__":
    run_script(lambda: main(parse(GameConfig)))
