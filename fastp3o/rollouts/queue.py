"""The queue of responses: the one that each slot works on, its tokens so far, and the one that is
next.

Its tensors stay in place. Response k of prompt p has the number p K + k, out of N = P K. R slots
take responses in the order of their numbers. A slot for which none is left is idle: it works on
number N, of prompt P.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastp3o.packing.packed_row import Ids, to_device
from fastp3o.rollouts.cache import Room
from fastp3o_kernels.decoding import Batch, Slots, Working, take_tokens

NO_TOKEN = -1


class Queue:
    """Serves one batch of prompts after the other. tokens: [R] int64, the input of each slot's next
    step. A prompt's last token is the first input of its responses, so that all tokens are sampled
    in one place.
    """

    def __init__(self, room: Room, end_ids: set[int], device: torch.device):
        self.room = room
        N, Lr = room.responses, room.response_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.end_ids, self.ends = end_ids, to_device(table_of_ends(end_ids), device)
        self.cached_lengths = zeros(room.prompts + 1)
        # By response: the input of its first step, the key of its random numbers, its tokens so far
        # and their log-probabilities. NO_TOKEN after its end.
        self.first_tokens = zeros(N + 1)
        self.keys = zeros(N + 1)
        self.sampled = zeros(N + 1, Lr)
        self.logprobs = zeros(N + 1, Lr, dtype=torch.float32)
        self.by_slot = zeros(3, room.slots)
        self.response, self.steps, self.tokens = self.by_slot
        self.most_own_tokens = 0  # of a slot, known where the host makes each step
        # The number of responses, and the last that a slot has taken.
        self.total, self.taken = zeros(), zeros()

    def tensors(self) -> list[Tensor]:
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def fill(self, prompts: Sequence[Ids], keys: Tensor) -> None:
        """Begins a batch. keys: [p, K] int64, keys of the responses' random numbers."""
        K, N = self.room.responses_per_prompt, self.room.responses
        total, slots = len(prompts) * K, len(self.response)

        def padded(values: Tensor, size: int) -> Tensor:
            return torch.nn.functional.pad(values, (0, size - len(values)))

        cached_lengths = padded(
            torch.tensor([len(ids) - 1 for ids in prompts]), self.room.prompts + 1
        )
        first_tokens = padded(
            torch.tensor([ids[-1] for ids in prompts]).repeat_interleave(K), N + 1
        )
        first = torch.arange(slots)
        response = first.masked_fill(first >= total, N)
        counts = torch.tensor([total, min(total, slots) - 1])
        begun = (
            cached_lengths,
            first_tokens,
            padded(keys.flatten(), N + 1),
            response,
            first_tokens[response],
            counts,
        )
        places = self.cached_lengths, self.first_tokens, self.keys, self.response, self.tokens
        *values, (total, taken) = to_device(begun, self.response.device)
        torch._foreach_copy_([*places, self.total, self.taken], [*values, total, taken])
        self.steps.zero_()
        self.sampled.fill_(NO_TOKEN)
        self.most_own_tokens = 0

    def slots(self) -> Slots:
        """The slots as attention takes them."""
        return Slots(
            self.response, self.cached_lengths, self.own_tokens(), self.room.responses_per_prompt
        )

    def own_tokens(self) -> Tensor:
        """[R] int64: own tokens of each slot in the cache."""
        return self.steps

    def take(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Adds the tokens [R] int64 that the slots sampled, and their log-probabilities [R] fp32. A
        slot whose response has ended takes the next one.
        """
        working = Working(self.response, self.steps, self.tokens)
        batch = Batch(
            self.sampled, self.logprobs, self.first_tokens, self.ends, self.total, self.taken
        )
        take_tokens(
            tokens, logprobs, working, batch, any_left=self.room.slots < self.room.responses
        )
        self.most_own_tokens += 1

    def working(self) -> Tensor:
        """[R] bool: the slots that are not idle."""
        return self.response < self.room.responses

    def keep_slots(self, kept: Tensor) -> None:
        """Drops all slots but these, int64."""
        self.response = self.response[kept]
        self.steps = self.steps[kept]
        self.tokens = self.tokens[kept]

    def results(self, prompts: int) -> tuple[list[list[Ids]], list[list[list[float]]]]:
        """Token ids and log-probabilities of the responses to the first prompts, [p][K]."""
        K, Lr = self.room.responses_per_prompt, self.room.response_tokens
        sampled, logprobs = self.sampled[: prompts * K], self.logprobs[: prompts * K]
        lengths = (sampled != NO_TOKEN).sum(1, keepdim=True)
        # One table of int64, so that the host waits for the device once. The bits of an fp64 hold a
        # log-probability exactly.
        bits = logprobs.double().view(torch.int64)
        table = torch.cat([lengths, sampled, bits], dim=1).cpu()
        lengths, sampled, bits = table.split([1, Lr, Lr], dim=1)
        logprobs = bits.contiguous().view(torch.float64)

        def by_prompt(values: Tensor) -> list[list]:
            rows = zip(values.tolist(), lengths.flatten().tolist(), strict=True)
            responses = [row[:length] for row, length in rows]
            return [responses[p * K : (p + 1) * K] for p in range(prompts)]

        return by_prompt(sampled), by_prompt(logprobs)


def table_of_ends(end_ids: set[int]) -> Tensor:
    """[largest id + 2] bool: whether each token ends a response. The last entry stands for all
    tokens behind the last id.

    `torch.isin` sorts from some twenty ids on, and waits for the device; stop strings have
    thousands.
    """
    ends = torch.zeros(max(end_ids | {-1}) + 2, dtype=torch.bool)
    # Negative ids, which some configurations have for "no end", are no tokens, and would be read as
    # places from the table's back.
    ends[[token for token in sorted(end_ids) if token >= 0]] = True
    return ends
