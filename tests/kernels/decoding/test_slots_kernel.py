"""What a step does for its slots, in Triton as in PyTorch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o_kernels.decoding import Batch, Slots, Working, take_tokens
from fastp3o_kernels.decoding.slots_kernel import launch_members
from tests.kernels.interpreted import counted_launches
from tests.kernels.problems import DEVICE, EXAMPLES

VOCABULARY, Lr = 12, 5


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    P=st.integers(1, 5),
    K=st.integers(1, 5),
    left_out=st.integers(0, 8),
    idle=st.integers(0, 3),
    seed=st.integers(0),
)
def test_slots_that_share_a_prompt(P, K, left_out, idle, seed):
    generator = torch.Generator().manual_seed(seed % 2**31)
    responses = torch.randperm(P * K, generator=generator)[left_out:]
    responses = torch.cat([responses, torch.full((idle,), P * K)])
    responses = responses[torch.randperm(len(responses), generator=generator)].to(DEVICE)
    if not len(responses):
        return
    lengths = torch.randint(0, 9, (P + 1,), generator=generator).to(DEVICE)
    lengths[P] = 0
    slots = Slots(responses, lengths, torch.zeros_like(responses), K)
    # As on a CPU.
    vars(slots)["by_kernel"] = None
    prompt, prompt_lengths, members = launch_members(responses, lengths, K)
    assert torch.equal(prompt, slots.prompt)
    assert torch.equal(prompt_lengths, slots.prompt_lengths)
    busy = responses < P * K
    assert torch.equal(members[busy], slots.members[busy])
    assert ((members >= -1) & (members < len(responses))).all()


def begun(N: int, R: int, total: int, ends: set[int]) -> tuple[Working, Batch]:
    """A batch of `total` responses in the room of N, of which slots have the first."""

    def filled(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, -1, dtype=dtype, device=DEVICE)

    response = torch.arange(R, device=DEVICE)
    table = torch.tensor([token in ends for token in range(max(ends | {-1}) + 2)], device=DEVICE)
    first_tokens = 100 + torch.arange(N + 1, device=DEVICE)
    taken = torch.tensor(min(total, R) - 1, device=DEVICE)
    batch = filled(N + 1, Lr), filled(N + 1, Lr, dtype=torch.float32), first_tokens, table
    slots = (
        response.masked_fill(response >= total, N),
        torch.zeros_like(response),
        first_tokens[:R].clone(),
    )
    return Working(*slots), Batch(*batch, torch.tensor(total, device=DEVICE), taken)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    slots=st.integers(1, 9),
    more=st.integers(0, 9),
    missing=st.integers(0, 4),
    ends=st.sets(st.integers(0, VOCABULARY + 3), max_size=6),
    seed=st.integers(0, 10**6),
)
def test_slots_take_the_next_responses(slots, more, missing, ends, seed):
    """Until all are over, and some steps longer."""
    N = slots + more
    total, generator = max(N - missing, 1), torch.Generator().manual_seed(seed)
    ways = {impl: begun(N, slots, total, ends) for impl in ("eager", "triton")}
    for _ in range(2 * Lr):
        tokens = torch.randint(VOCABULARY, (slots,), generator=generator).to(DEVICE)
        logprobs = torch.randn(slots, generator=generator).to(DEVICE)
        for impl, (working, batch) in ways.items():
            take_tokens(tokens, logprobs, working, batch, any_left=more > 0, impl=impl)
        (ours, our_batch), (theirs, their_batch) = ways["triton"], ways["eager"]
        busy = theirs.response < N
        assert torch.equal(ours.response, theirs.response)
        assert all(torch.equal(a[busy], b[busy]) for a, b in zip(ours, theirs, strict=True))
        assert torch.equal(our_batch.sampled[:N], their_batch.sampled[:N])
        assert torch.equal(our_batch.logprobs[:N], their_batch.logprobs[:N])
        assert our_batch.taken == their_batch.taken or not more


def test_each_in_one_launch(monkeypatch):
    working, batch = begun(6, 4, 6, {3})
    tokens, logprobs = (
        torch.zeros(4, dtype=torch.int64, device=DEVICE),
        torch.zeros(4, device=DEVICE),
    )
    with counted_launches(monkeypatch) as launches:
        take_tokens(tokens, logprobs, working, batch, impl="triton")
    assert launches == {"take_kernel": 1}
    with counted_launches(monkeypatch) as launches:
        launch_members(working.response, batch.first_tokens[:4], 2)
    assert launches == {"members_kernel": 1}


def test_no_slots():
    working, batch = begun(3, 0, 3, set())
    before = batch.sampled.clone()
    take_tokens(working.tokens, torch.zeros(0, device=DEVICE), working, batch, any_left=False)
    assert torch.equal(batch.sampled, before)
    with pytest.raises(ValueError, match="impl must be"):
        take_tokens(working.tokens, torch.zeros(0, device=DEVICE), working, batch, impl="fast")
