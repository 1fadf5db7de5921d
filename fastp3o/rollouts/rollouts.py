"""What a sampler returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

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
        """With other rollouts in the places of some prompts, counted from 0."""
        places = {number: place for place, number in enumerate(numbers)}
        columns = {
            name: value and [getattr(others, name)[places[p]] if p in places else mine for p, mine in enumerate(value)]
            for name, value in vars(self).items()
        }
        return Rollouts(**columns)

    def texts(self) -> tuple[list[str], list[str]]:
        """Prompts and responses side by side, P K of each."""
        prompts = [prompt for prompt, group in zip(self.prompts, self.responses, strict=True) for _ in group]
        return prompts, list(chain.from_iterable(self.responses))


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
