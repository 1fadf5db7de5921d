"""Rollouts: a group is a prompt with the responses sampled for it. Also the type of samplers, and
what they share.
"""

import json
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastp3o.config import SamplerConfig
from fastp3o.data.encoding import response_ends
from fastp3o.data.loading import column_values
from fastp3o.data.tokens import INSIDE, Continuation
from fastp3o.packing.pack import Packing, pack
from fastp3o.packing.packed_row import Ids, PackedRow

# --- prompts and responses ------------------------------------------------------------------------


class Prompt(NamedTuple):
    """A prompt as samplers and rewards take it."""

    text: str
    ids: list[int]
    # Among all prompts that the processes sample together; random numbers depend on it.
    number: int = 0
    columns: Mapping[str, Any] = {}  # further fields of the prompt's record, for rewards
    given: str = ""  # as the record has it, in JSON, for rewards that take messages; empty where no reward does


class Turn(NamedTuple):
    """A turn of the policy in a trajectory. The tokens between two turns are an observation."""

    start: int  # its tokens are ids[start:end] of the response
    end: int
    rewards: Mapping[str, float] = {}  # that the environment gave for it, by name
    failure: str = ""  # what the environment raised


class Response(NamedTuple):
    """One response; or a trajectory, whose ids are the policy's turns and the environment's
    observations. Labels, log-probs and lengths are of the policy's own tokens alone.
    """

    ids: list[int]  # with the end-of-sequence if it was sampled
    text: str  # what prompt and ids decode to behind the prompt, without special tokens: see `Continuation.text`
    finished: bool  # whether it ended with an end-of-sequence; of a trajectory: whether the environment says so
    # Log π of its own tokens in nats by the sampler; None if it computes none.
    logprobs: Sequence[float] | None = None
    turns: tuple[Turn, ...] = ()  # of a trajectory

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The spans of ids that the policy sampled."""
        return [(turn.start, turn.end) for turn in self.turns] or [(0, len(self.ids))]

    @property
    def own_places(self) -> np.ndarray:
        """[n] int64: the place of each token among those that the policy sampled; an observed token
        has the place of the sampled one before it.
        """
        own = np.zeros(len(self.ids), dtype=np.int64)
        for start, end in self.spans:
            own[start:end] = 1
        return np.maximum(own.cumsum() - 1, 0)


class Group(NamedTuple):
    """A prompt with its K responses."""

    prompt: Prompt
    responses: list[Response]


class AtTokens(NamedTuple):
    """Rewards at tokens of a response. If a place occurs several times, its rewards are added."""

    prompt: int
    response: int
    places: np.ndarray  # [n] int64, among the policy's own tokens
    values: np.ndarray  # [n] fp64


# --- what others need of them ---------------------------------------------------------------------


def make_prompts(
    examples: Mapping[str, list], numbers: Sequence[int] | None = None
) -> list[Prompt]:
    """The prompts of a batch of `load_prompts`. numbers: a number for each prompt; by default
    counted from 0.
    """
    columns = column_values(examples)
    texts, ids = examples["prompt"], examples["prompt_ids"]
    numbers = range(len(texts)) if numbers is None else numbers
    records = examples.get("given") or [""] * len(texts)
    return [
        Prompt(*prompt, {name: values[index] for name, values in columns.items()}, records[index])
        for index, prompt in enumerate(zip(texts, ids, numbers, strict=True))
    ]


def token_ids(groups: Sequence[Group]) -> tuple[list[Ids], list[list[Ids]]]:
    """Token ids of prompts, [P], and of responses, [P][K]."""
    return [group.prompt.ids for group in groups], [
        [response.ids for response in group.responses] for group in groups
    ]


def pack_groups(
    groups: Sequence[Group], packing: Packing, numbers: Sequence[int] | None = None
) -> list[PackedRow]:
    """Packs groups into rows in which only the policy's tokens are labeled. numbers: those of the
    groups; by default counted from 0.
    """
    numbers = range(len(groups)) if numbers is None else numbers
    chosen = [groups[number] for number in numbers]
    has_turns = any(response.turns for group in chosen for response in group.responses)
    spans = (
        [[response.spans for response in group.responses] for group in chosen]
        if has_turns
        else None
    )
    return pack(*token_ids(chosen), packing, groups=numbers, labeled=spans)


def texts(groups: Sequence[Group]) -> tuple[list[str], list[str]]:
    """Prompts and responses as two lists of P K texts."""
    responses = [response.text for group in groups for response in group.responses]
    return [group.prompt.text for group in groups for _ in group.responses], responses


def texts_or_messages(groups: Sequence[Group]) -> tuple[list[Any], list[Any]]:
    """Like `texts`, but a prompt whose record is a list of messages stays that list, and its
    response is a list with the assistant's message.
    """
    pairs: list[tuple[Any, Any]] = []
    for prompt, responses in groups:
        for response in responses:
            messages = json.loads(prompt.given)["prompt"] if prompt.given else ""
            reply = [{"role": "assistant", "content": response.text}]
            pairs.append(
                (messages, reply) if isinstance(messages, list) else (prompt.text, response.text)
            )
    return [prompt for prompt, _ in pairs], [response for _, response in pairs]


def lengths(groups: Sequence[Group]) -> Tensor:
    """[P, K] fp32: the number of the policy's tokens in each response, including the
    end-of-sequence.
    """

    def tokens(response: Response) -> int:
        return sum(end - start for start, end in response.spans)

    return torch.tensor([list(map(tokens, group.responses)) for group in groups]).float()


def finished(groups: Sequence[Group]) -> Tensor:
    """[P, K] bool: whether each response ended with an end-of-sequence."""
    return torch.tensor([[response.finished for response in group.responses] for group in groups])


# sampler(prompts, K, seed) returns a group with K responses for each prompt, in the same order.
# Equal seeds give equal responses of equal policies. By default a sampler draws from the policy
# itself, whose ratios and KL P3O is about.
Sampler = Callable[[list[Prompt], int, int], list[Group]]


# --- how responses are drawn, and where they end --------------------------------------------------


@dataclass(frozen=True)
class SamplingSettings:
    """The choice of tokens from the policy's distribution; by default they are samples of it. Its
    temperature is the policy's own (`PackedModel.temperature`).

    top_k: only the k most likely tokens, 0 for all. top_p: only the most likely tokens that
    together have this probability. min_p: only tokens with this share of the most likely one's
    probability. stops: texts that end a response.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stops: tuple[str, ...] = ()


POLICY_ITSELF = SamplingSettings()


def sampling_settings(config: SamplerConfig) -> SamplingSettings:
    return SamplingSettings(config.top_k, config.top_p, config.min_p, config.stops)


class Ends:
    """What ends a response: the tokens of `response_ends`, and stop strings. ids: the tokens that
    end a response whatever stands before them, those that hold a stop string among them.
    """

    def __init__(
        self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()
    ):
        self.continuation, self.stops = Continuation(tokenizer), stops
        self.ids = set(response_ends(tokenizer, policy.generation_config).ids)
        if stops:
            numbers = range(len(tokenizer))
            self.ids |= {
                number
                for number in numbers
                if self.stop_in(self.continuation.text([number], INSIDE))
            }

    def stop_in(self, text: str) -> bool:
        return any(stop in text for stop in self.stops)

    def cut(self, ids: Ids, last: int) -> Ids:
        """The ids up to and including the token that completes the first stop string."""
        lengths, text = range(1, len(ids)), self.continuation.text
        return ids[
            : 1
            + bisect_left(lengths, True, key=lambda length: self.stop_in(text(ids[:length], last)))
        ]

    def responses(
        self,
        ids: list[Ids],
        logprobs: list[list[float]] | None = None,
        *,
        prompts: Sequence[Prompt] | None = None,
    ) -> Iterator[Response]:
        """Responses, cut after their first stop string. logprobs: one for each token, in nats.
        prompts: of each response; None where they end with text.
        """
        # Arrays take an eighth of a list's memory, and numbers of fp32 lose nothing.
        compact = (
            [None] * len(ids) if logprobs is None else [array("f", values) for values in logprobs]
        )
        lasts = [INSIDE] * len(ids) if prompts is None else [prompt.ids[-1] for prompt in prompts]
        for last, response_ids, values in zip(lasts, ids, compact, strict=True):
            text = self.continuation.text(response_ids, last)
            if stopped := self.stop_in(text):
                response_ids = self.cut(response_ids, last)
                text = self.continuation.text(response_ids, last)
                values = values and values[: len(response_ids)]
            yield Response(response_ids, text, stopped or response_ids[-1] in self.ids, values)
