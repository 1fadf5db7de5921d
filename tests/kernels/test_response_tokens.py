import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o_kernels import linear_logprobs, response_tokens
from tests.kernels.problems import random_hidden_states


def padded(
    groups: list[tuple[list[int], list[list[int]]]], left: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and response_mask of prompts with responses: 0s pad on the right, and prompts on
    the left or not.
    """
    longest = max(len(prompt) for prompt, _ in groups) if left else 0
    rows = [
        ([0] * (longest - len(prompt)) + prompt, response)
        for prompt, rs in groups
        for response in rs
    ]
    width = max(len(prompt + response) for prompt, response in rows)
    ids = [prompt + response + [0] * (width - len(prompt + response)) for prompt, response in rows]
    mask = [
        [len(prompt) <= place < len(prompt + response) for place in range(width)]
        for prompt, response in rows
    ]
    return torch.tensor(ids), torch.tensor(mask)


TOKENS = st.lists(st.integers(1, 9), min_size=1, max_size=5)
GROUPS = st.lists(
    st.tuples(TOKENS, st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=2, max_size=2)),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(
    groups=GROUPS,
    left=st.booleans(),
    dtype=st.sampled_from([torch.bool, torch.int64, torch.float32]),
)
def test_tokens_of_a_padded_batch(groups, left, dtype):
    ids, mask = padded(groups, left)
    tokens = response_tokens(ids, mask.to(dtype), responses_per_prompt=2)
    responses = [response for _, rs in groups for response in rs]
    assert tokens.labels.tolist() == [token for response in responses for token in response]
    assert tokens.cu_seqlens.diff().tolist() == [len(response) for response in responses]
    assert tokens.cu_seqlens.device.type == "cpu"
    assert torch.equal(tokens.select(ids), tokens.labels)
    states = random_hidden_states(ids.numel(), 10, 4, torch.device("cpu"))
    whole = (
        states.logits()
        .view(*ids.shape, 10)
        .log_softmax(-1)[:, :-1]
        .gather(2, ids[:, 1:, None])
        .squeeze(2)
    )
    got = linear_logprobs(states.hidden[tokens.predicted_at], states.head, tokens.labels)
    torch.testing.assert_close(got, whole[mask[:, 1:]])


def test_masked_tokens_of_tools_padding_on_the_left_and_rows_of_several_prompts():
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 0]])
    tokens = response_tokens(torch.tensor([[5, 1, 2, 3], [5, 6, 7, 8]]), mask)
    assert tokens.labels.tolist() == [1, 3, 7]
    assert tokens.predicted_at.tolist() == [0, 2, 5]
    # Padding on the left makes rows of a prompt differ in where they begin.
    ids = torch.tensor([[0, 0, 1, 2, 5], [0, 1, 2, 6, 7]])
    mask = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 1, 1]])
    assert response_tokens(ids, mask, responses_per_prompt=2).labels.tolist() == [5, 6, 7]
    # First and second responses in two halves.
    halves = torch.tensor([[5, 1], [6, 2], [5, 3], [6, 4]])
    with pytest.raises(
        ValueError, match="rows 0 and 1 of the batch are taken for responses to one prompt"
    ):
        response_tokens(halves, torch.tensor([[0, 1]] * 4), responses_per_prompt=2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"input_ids": torch.zeros(4, dtype=torch.long)}, r"must have shape \[B, T\]"),
        ({"response_mask": torch.ones(2, 2)}, r"response_mask must have shape \[2, 3\]"),
        ({"response_mask": torch.tensor([[0, 1, 1], [1, 1, 0]])}, r"response_mask\[1, 0\] is 1"),
        (
            {"response_mask": torch.tensor([[0, 0.5, 1], [0, 1, 0]])},
            r"response_mask\[0, 1\] is 0.5",
        ),
        ({"responses_per_prompt": 3}, "no multiple of the 3"),
    ],
)
def test_bad_batches(changed, message):
    given = {
        "input_ids": torch.ones(2, 3, dtype=torch.long),
        "response_mask": torch.tensor([[0, 1, 1], [0, 1, 0]]),
    }
    with pytest.raises(ValueError, match=message):
        response_tokens(**(given | changed))
