"""What a sampler returns."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rollouts:
    """P prompts with K responses each."""

    prompts: list[str]  # [P]
    prompt_ids: list[list[int]]  # [P]
    responses: list[list[str]]  # [P][K], without special tokens
    response_ids: list[list[list[int]]]  # [P][K], the end-of-sequence included where it was sampled
    finished: list[list[bool]]  # [P][K], whether the response ended with an end-of-sequence
    # [P][K], of each token as the sampler computed it, in nats under the policy itself; None where it does not say.
    logprobs: list[list[list[float]]] | None = None
    # [P] by name: what the data have on each prompt besides, for rewards.
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of prompts."""
        return len(self.prompts)

    @property
    def responses_per_prompt(self) -> int:
        return len(self.responses[0])

    @property
    def response_lengths(self) -> list[list[int]]:
        """[P][K], in tokens."""
        return [[len(ids) for ids in group] for group in self.response_ids]

    def with_prompts(self, numbers: Sequence[int], others: "Rollouts") -> "Rollouts":
        """With others' responses to some of the prompts, counted from 0."""
        places = {number: place for place, number in enumerate(numbers)}
        sampled: dict[str, Any] = {
            name: [theirs[places[p]] if p in places else mine for p, mine in enumerate(own)]
            for name in ("responses", "response_ids", "finished", "logprobs")
            if (own := getattr(self, name)) is not None and (theirs := getattr(others, name)) is not None
        }
        return replace(self, **sampled)

    def texts(self) -> tuple[list[str], list[str]]:
        """Prompts and responses side by side, P K of each."""
        return self.beside_responses(self.prompts), list(chain.from_iterable(self.responses))

    def beside_responses(self, of_prompts: list[Any]) -> list[Any]:
        """What belongs to the prompts [P], once for each response, [P K]."""
        return [value for value, group in zip(of_prompts, self.responses, strict=True) for _ in group]


def decode_rollouts(
    tokenizer: PreTrainedTokenizerBase,
    end_ids: set[int],
    prompts: list[str],
    prompt_ids: list[list[int]],
    response_ids: list[list[list[int]]],
    logprobs: list[list[list[float]]] | None = None,
) -> Rollouts:
    """Rollouts from the token ids of responses."""
    return Rollouts(
        prompts=prompts,
        prompt_ids=prompt_ids,
        responses=[tokenizer.batch_decode(group, skip_special_tokens=True) for group in response_ids],
        response_ids=response_ids,
        finished=[[ids[-1] in end_ids for ids in group] for group in response_ids],
        logprobs=logprobs,
    )
