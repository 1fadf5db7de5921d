"""The responses of a batch, and what slots work on.

R slots, N responses, of Lr tokens at most.
"""

from typing import NamedTuple

from torch import Tensor


class Working(NamedTuple):
    """What the slots work on, [R] int64 each: the response, N where a slot is idle; its tokens
    before this step; and the input of the next step.
    """

    response: Tensor
    steps: Tensor
    tokens: Tensor


class Batch(NamedTuple):
    """The responses of a batch. The last row of what has N + 1 is idle slots'.

    sampled: [N + 1, Lr] int64, tokens so far. logprobs: [N + 1, Lr] fp32, theirs. first_tokens: [N
    + 1] int64, inputs of first steps. ends: [E] bool: whether a token ends a response; the last
    entry stands for all from there on. total: [] int64, the number of responses. taken: [] int64,
    the last that a slot has taken; those before it are, too.
    """

    sampled: Tensor
    logprobs: Tensor
    first_tokens: Tensor
    ends: Tensor
    total: Tensor
    taken: Tensor
