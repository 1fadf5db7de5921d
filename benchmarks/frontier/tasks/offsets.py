"""Offsets δ(x) of the reward, equal for all responses to a prompt: preferences stay, and a critic has more to learn."""

import hashlib
import re
from collections.abc import Callable
from statistics import NormalDist

# Multiples of it up to 2^13 have 23 bits, so fp32 holds them and their sums exactly: the difference of two rewards has
# the same bits with an offset as without.
GRID = 2.0**-10

Offset = Callable[[str], float]


def learnable(prompt: str) -> float:
    """A number that the prompt's text shows; over prompts its mean is about 0 and its standard deviation about 1.

    Half of the variance is the topic's, half the style's, in equal steps each. For other prompts it is the place in
    the alphabet of the second word's first letter: the first word is often a heading, such as "MODULE:" in all of them.
    """
    topic_and_style = re.match(r"topic(\d) style(\d)", prompt)
    if topic_and_style:
        topic, style = map(int, topic_and_style.groups())
        return (even_step(topic, 10) + even_step(style, 4)) / 2**0.5
    words = prompt.split()[:2] or ["?"]
    return even_step(ord(words[-1][0].lower()) % 32 - 1, 26)


def even_step(index: int, count: int) -> float:
    """Number `index` of `count` that are equally far apart, of mean 0 and standard deviation 1."""
    return (index - (count - 1) / 2) / ((count**2 - 1) / 12) ** 0.5


def unlearnable(prompt: str) -> float:
    """A normal number from a cryptographic hash of the prompt, which nothing predicts for an unseen prompt."""
    bits = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:6])
    return NormalDist().inv_cdf((bits + 0.5) / 2**48)


OFFSETS: dict[str, Offset | None] = {"none": None, "learnable": learnable, "unlearnable": unlearnable}


def on_grid(value: float) -> float:
    """The nearest multiple of GRID."""
    return round(value / GRID) * GRID
