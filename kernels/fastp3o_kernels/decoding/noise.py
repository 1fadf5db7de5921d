"""Random numbers that are a function of (seed, prompt, response, position) alone, and need no generator state.

A counter-based generator: number i of the SplitMix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014) that starts at `key`. Its numbers are keys of further generators: the seed's give one
to each prompt, a prompt's one to each response; a response's are what is sampled with, so many to each step.
int64 throughout; products wrap around.
"""

import torch
from torch import Tensor

GAMMA, FIRST, SECOND = (constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def random_bits(keys: Tensor, numbers: Tensor) -> Tensor:
    """Numbers 0, 1, ... of the generators that start at `keys`; int64, shapes broadcast."""
    bits = keys + (numbers + 1) * GAMMA
    bits ^= logical_shift(bits, 30)
    bits *= FIRST
    bits ^= logical_shift(bits, 27)
    bits *= SECOND
    bits ^= logical_shift(bits, 31)
    return bits


def logical_shift(bits: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in."""
    return (bits >> by).bitwise_and_(2 ** (64 - by) - 1)


def response_keys(seed: int, prompt_numbers: Tensor, responses_per_prompt: int) -> Tensor:
    """[P, K] int64: a key for each response.

    seed: below 2^63. prompt_numbers: [P] int64, the prompts' numbers in the whole run, not in a batch or process.
    """
    of_prompts = random_bits(prompt_numbers.new_tensor(seed), prompt_numbers)
    return random_bits(of_prompts[:, None], torch.arange(responses_per_prompt, device=prompt_numbers.device))


def exponentials(keys: Tensor, steps: Tensor, count: int) -> Tensor:
    """[R, count] fp64, independent with mean 1: the next `count` numbers of each response [R] at each step [R]."""
    bits = random_bits(keys[:, None], steps[:, None] * count + torch.arange(count, device=keys.device))
    # Middles of 2^52 equal parts of (0, 1), which fp64 holds exactly: never 0 nor 1.
    uniform = logical_shift(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_()
