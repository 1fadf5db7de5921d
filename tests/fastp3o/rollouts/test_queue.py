import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o.rollouts.cache import Room
from fastp3o.rollouts.queue import Queue

END, K, LONGEST = 7, 2, 4


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, LONGEST + 1), min_size=1, max_size=5), st.integers(1, 5), st.integers(0, 2), st.booleans()
)
def test_slots_take_responses_in_turn_and_keep_what_they_sample(lengths, slots, room_beyond, drops):
    """Token t of response n is 100 n + 10 + t, and its end is where `lengths` has it, or the room ends before."""
    P = len(lengths)
    prompts = [[5] * (p + 1) + [20 + p] for p in range(P)]
    wanted = [length if k == 0 else 1 + length % 3 for length in lengths for k in range(K)]
    queue = Queue(Room(P + room_beyond, P, K, slots, LONGEST), {END, END + 1}, torch.device("cpu"))
    queue.fill(prompts, torch.arange(P * K).view(P, K))
    order: list[int] = []
    for _ in range(100):
        if not queue.working().any():
            break
        attended, bounded = queue.slots(bounds=False), queue.slots(bounds=True)
        tokens, logprobs = [], []
        for response, step, token in zip(queue.response, queue.steps, queue.tokens, strict=True):
            n, t = int(response), int(step)
            if n == queue.room.responses:
                tokens.append(3)
                logprobs.append(0.0)
                continue
            assert queue.keys[n] == n
            assert int(token) == (20 + n // K if t == 0 else 100 * n + 10 + t - 1)
            order += [n] if t == 0 else []
            tokens.append(END if t + 1 == wanted[n] else 100 * n + 10 + t)
            logprobs.append(-float(t))
        working = queue.response < queue.room.responses
        at_work = queue.response[working] // K
        assert torch.equal(attended.prompt_lengths[working], at_work + 1)
        assert bounded.prompts == range(int(at_work.min()), int(at_work.max()) + 1)
        assert bounded.longest_prompt == int(at_work.max()) + 1
        assert bounded.longest_response == int(queue.steps[working].max()) + 1
        queue.take(torch.tensor(tokens), torch.tensor(logprobs))
        if drops and queue.working().any():
            queue.keep_slots(queue.working().argsort(descending=True, stable=True), int(queue.working().sum()))
    assert not queue.working().any()
    assert order == list(range(P * K))
    ids, logprobs = queue.results(P)
    for n, length in enumerate(wanted):
        end = [END] if length <= LONGEST else [100 * n + 10 + LONGEST - 1]
        expected = [100 * n + 10 + t for t in range(min(length, LONGEST) - 1)] + end
        assert ids[n // K][n % K] == expected
        assert logprobs[n // K][n % K] == [-float(t) for t in range(len(expected))]
