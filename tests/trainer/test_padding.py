import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastp3o.padding import pad

ids = st.lists(st.integers(2, 99), min_size=1, max_size=7)


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=5), st.booleans())
def test_every_scored_token_is_predicted_by_the_row_before_it(pairs, score_prompts):
    prompts, responses = [list(p) for p, _ in pairs], [list(r) for _, r in pairs]
    batch = pad(prompts, responses, pad_token_id=0, score_prompts=score_prompts)
    flat = batch.input_ids.flatten()
    assert torch.equal(flat[batch.scored_rows + 1], batch.labels)
    for s, (prompt, response) in enumerate(pairs):
        of_sequence = batch.labels[batch.cu_seqlens[s] : batch.cu_seqlens[s + 1]].tolist()
        assert of_sequence == (prompt[1:] if score_prompts else []) + response
        assert flat[batch.last_rows[s]] == response[-1]
        assert batch.attention_mask[s].sum() == len(prompt) + len(response)
    assert batch.cu_seqlens.dtype == torch.int32


def test_an_empty_response_is_refused_by_its_index():
    with pytest.raises(ValueError, match="sequence 1 has 1 prompt and 0 response tokens"):
        pad([[1], [2]], [[3], []], pad_token_id=0)
