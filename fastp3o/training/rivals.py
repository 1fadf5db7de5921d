"""Responses that others are compared with: the reference's in training, a rival's in evaluations."""

from zlib import crc32

from fastp3o.packing.seeds import derived_seed
from fastp3o.rollouts.groups import Prompt, Response, Sampler

# Sets the seed of anchors apart from those of updates, which are counted from 0.
ANCHOR = 2**32 - 5


class Anchors:
    """One response of the reference to each prompt, as long as it stays the same one: a prompt that comes again meets
    the same response.
    """

    def __init__(self, sampler: Sampler, seed: int):
        self.sampler, self.seed = sampler, derived_seed(seed, ANCHOR)

    def __call__(self, prompts: list[Prompt]) -> list[Response]:
        numbered = [prompt._replace(number=crc32(prompt.text.encode())) for prompt in prompts]
        return [group.responses[0] for group in self.sampler(numbered, 1, self.seed)]
