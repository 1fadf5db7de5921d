"""The queue of responses: the one that each slot works on, its tokens so far, and the one that is next.

Its tensors stay in place.

Response k of prompt p has the number p K + k, out of N = P K. R slots take responses in the order of their numbers. A
slot for which none is left is idle: it works on number N, of prompt P.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastp3o.packing.packed_row import Ids
from fastp3o.rollouts.cache import Room
from fastp3o_kernels.decoding import Slots


class Queue:
    """Serves one batch of prompts after the other.

    tokens: [R] int64, the input of each slot's next step. A prompt's last token is the first input of its responses, so
    that all tokens are sampled in one place.
    """

    def __init__(self, room: Room, end_ids: set[int], device: torch.device):
        self.room = room
        N, Lr = room.responses, room.response_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.end_ids = torch.tensor(sorted(end_ids), device=device)
        self.cached_lengths, self.last_tokens = zeros(room.prompts + 1), zeros(room.prompts + 1)
        self.keys = zeros(N + 1)  # of random numbers
        self.sampled, self.logprobs = zeros(N + 1, Lr), zeros(N + 1, Lr, dtype=torch.float32)
        self.lengths = zeros(N + 1)  # tokens sampled so far
        self.response, self.steps, self.tokens = zeros(3, room.slots)
        self.total, self.waiting = zeros(), zeros()  # number of responses, and the first that no slot has taken

    def tensors(self) -> list[Tensor]:
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def fill(self, prompts: Sequence[Ids], keys: Tensor) -> None:
        """Begins a batch. keys: [p, K] int64, keys of the responses' random numbers."""
        K = self.room.responses_per_prompt
        total = len(prompts) * K
        self.cached_lengths.zero_()[: len(prompts)] = torch.tensor([len(ids) - 1 for ids in prompts])
        self.last_tokens.zero_()[: len(prompts)] = torch.tensor([ids[-1] for ids in prompts])
        self.keys[:total] = keys.flatten()
        first = torch.arange(len(self.response), device=self.response.device)
        self.response.copy_(first.masked_fill(first >= total, self.room.responses))
        self.steps.zero_()
        self.tokens.copy_(self.last_tokens[self.response // K])
        self.total.fill_(total)
        self.waiting.fill_(min(total, len(first)))

    def slots(self, *, bounds: bool) -> Slots:
        """The slots as attention takes them. bounds: the host looks at the tensors to limit the work."""
        K = self.room.responses_per_prompt
        if not bounds:
            return Slots(self.response, self.cached_lengths, self.steps, K)
        prompts = self.response // K
        working = prompts[self.response < self.room.responses]
        first, last = working.aminmax()
        prompts = range(int(first), int(last) + 1)
        return Slots(
            self.response,
            self.cached_lengths,
            self.steps,
            K,
            prompts=prompts,
            longest_prompt=int(self.cached_lengths[prompts.start : prompts.stop].max()),
            longest_response=int(self.steps.max()) + 1,
        )

    def take(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Adds the tokens [R] int64 that the slots sampled, and their log-probabilities [R] fp32. A slot whose response
        has ended takes the next one.
        """
        Lr, N = self.room.response_tokens, self.room.responses
        place = self.response * Lr + self.steps
        self.sampled.view(-1).scatter_(0, place, tokens)
        self.logprobs.view(-1).scatter_(0, place, logprobs)
        steps = self.steps + 1
        self.lengths.scatter_(0, self.response, steps)
        ended = (tokens[:, None] == self.end_ids).any(1) | (steps == Lr)
        takes = ended & (self.response < N)
        taken = takes.cumsum(0)
        next_response = self.waiting + taken - 1
        next_response = next_response.masked_fill(next_response >= self.total, N)
        self.waiting += taken[-1]
        torch.where(takes, next_response, self.response, out=self.response)
        begins = takes | (self.response == N)
        self.steps.copy_(steps.masked_fill(begins, 0))
        torch.where(begins, self.last_tokens[self.response // self.room.responses_per_prompt], tokens, out=self.tokens)

    def working(self) -> Tensor:
        """[R] bool: the slots that are not idle."""
        return self.response < self.room.responses

    def keep_slots(self, kept: Tensor) -> None:
        """Keeps some slots, [n] int64, in this order."""
        self.response, self.steps, self.tokens = self.response[kept], self.steps[kept], self.tokens[kept]

    def results(self, prompts: int) -> tuple[list[list[Ids]], list[list[list[float]]]]:
        """Token ids and log-probabilities of the responses to the first prompts, [p][K]."""
        K = self.room.responses_per_prompt
        lengths = self.lengths.tolist()

        def cut(values: Tensor) -> list[list]:
            lists = values[: prompts * K].tolist()
            flat = [tokens[:length] for tokens, length in zip(lists, lengths, strict=False)]
            return [flat[p * K : (p + 1) * K] for p in range(prompts)]

        return cut(self.sampled), cut(self.logprobs)
