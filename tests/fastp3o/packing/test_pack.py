from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o.packing.bins import balanced, deal, first_fit_decreasing
from fastp3o.packing.pack import efficiency, group_tokens, pack
from fastp3o.packing.packed_row import ALIGNMENT, upload
from fastp3o.packing.settings import Packing
from fastp3o.packing.tables import by_group
from tests.fastp3o.counted import instructions
from tests.fastp3o.models.model_families import FOURS

ids = st.lists(st.integers(0, 99), min_size=1, max_size=7)
many_groups = st.lists(
    st.tuples(ids, st.lists(ids, min_size=1, max_size=4)), min_size=1, max_size=6
)
few = settings(max_examples=60, deadline=None)


@few
@given(many_groups, st.integers(1, 60), st.booleans())
def test_every_response_token_is_labeled_once_from_the_token_before(
    groups, tokens_per_row, share_prompts
):
    prompts, responses = [prompt for prompt, _ in groups], [group for _, group in groups]
    rows = pack(prompts, responses, Packing(tokens_per_row, share_prompts))
    assert sorted(g for row in rows for g in row.groups) == list(range(len(groups)))
    for row in rows:
        assert row.tokens <= tokens_per_row or len(row.groups) == 1
        assert row.tokens == sum(
            group_tokens(len(prompts[g]), list(map(len, responses[g])), share_prompts=share_prompts)
            for g in row.groups
        )
        # groups stay whole
        sequences = [(prompts[g], response) for g in row.groups for response in responses[g]]
        tokens, positions = row.input_ids[0].tolist(), row.position_ids[0].tolist()
        labeled = zip(
            row.labeled_at.split(row.labeled_lengths),
            row.labels.split(row.labeled_lengths),
            strict=True,
        )
        every = zip(sequences, row.ends_at.tolist(), labeled, strict=True)
        for (prompt, response), last, (predicting, labels) in every:
            assert labels.tolist() == response
            assert [tokens[t] for t in predicting.tolist()] == [prompt[-1], *response[:-1]]
            first = len(prompt) - 1
            assert [positions[t] for t in predicting.tolist()] == list(
                range(first, first + len(response))
            )
            assert (tokens[last], positions[last]) == (
                response[-1],
                len(prompt) + len(response) - 1,
            )
        assert row.cu_seqlens.tolist() == [0, *accumulate(row.labeled_lengths)]
        assert torch.equal(row.cu_seqlens, row.cu_seqlens_on_host)
        assert (row.cu_seqlens.dtype, row.labels.dtype) == (torch.int32, torch.int64)


@few
@given(many_groups, st.booleans())
def test_the_keys_of_a_response_are_its_prompt_and_itself(groups, share_prompts):
    prompts, responses = [prompt for prompt, _ in groups], [group for _, group in groups]
    (row,) = pack(prompts, responses, Packing(1000, share_prompts))
    segments, shared = row.segments, row.segments.shared
    assert segments.cu_queries.tolist() == [0, *accumulate(segments.query_lengths)]
    assert segments.cu_keys.tolist() == [0, *accumulate(segments.key_lengths)]
    assert segments.cu_queries.dtype == segments.cu_keys.dtype == torch.int32
    assert sum(segments.query_lengths) == row.tokens
    assert (shared is not None) == (share_prompts and any(len(group) > 1 for group in responses))

    # Segments are in the order of the row's responses.
    sequences = [prompts[g] + response for g in row.groups for response in responses[g]]
    keys_of_row = torch.arange(row.tokens) if shared is None else shared.tokens
    ids = row.input_ids[0][keys_of_row].split(segments.key_lengths)
    positions = row.position_ids[0][keys_of_row].split(segments.key_lengths)
    queries = torch.arange(row.tokens).split(segments.query_lengths)
    keys = keys_of_row.split(segments.key_lengths)
    for sequence, key_ids, at, query, key in zip(
        sequences, ids, positions, queries, keys, strict=True
    ):
        assert key_ids.tolist() == sequence
        assert at.tolist() == list(range(len(sequence)))
        assert key[-len(query) :].tolist() == query.tolist()  # aligned at the end
    if shared is None:
        return

    # Own and again are all places of a token among the keys.
    assert shared.tokens[shared.own].tolist() == list(range(row.tokens))
    places = shared.own.tolist()
    for tokens, keys in shared.repeats:
        assert shared.tokens[keys].tolist() == tokens.tolist()
        assert len(set(tokens.tolist())) == len(tokens) > 0
        places += keys.tolist()
    assert sorted(places) == list(range(len(shared.tokens)))
    assert len(shared.repeats) == max(map(len, responses)) - 1


@few
@given(many_groups, st.booleans(), st.data())
def test_parts_of_responses_are_labeled_and_an_empty_one_labels_nothing(
    groups, share_prompts, data
):
    prompts, responses = [prompt for prompt, _ in groups], [group for _, group in groups]

    def spans(response):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(response)), max_size=4)))
        return list(zip(cuts[::2], cuts[1::2], strict=False))

    labeled = [
        None if data.draw(st.booleans()) else [spans(response) for response in group]
        for group in responses
    ]
    whole, parts = (
        pack(prompts, responses, Packing(20, share_prompts), labeled=one) for one in (None, labeled)
    )
    for row, one in zip(whole, parts, strict=True):
        assert torch.equal(row.input_ids, one.input_ids)
        expected: list[list] = []
        of_responses = [
            values.split(row.labeled_lengths) for values in (row.labeled_at, row.labels)
        ]
        tokens = zip(*of_responses, strict=True)
        for group in row.groups:
            for k, response in enumerate(responses[group]):
                chosen = [(0, len(response))] if labeled[group] is None else labeled[group][k]
                places = [place for begin, end in chosen for place in range(begin, end)]
                expected.append([values[places].tolist() for values in next(tokens)])
        assert one.labeled_lengths == tuple(len(labels) for _, labels in expected)
        assert one.labeled_at.tolist() == [place for at, _ in expected for place in at]
        assert one.labels.tolist() == [label for _, labels in expected for label in labels]
        assert one.labels.dtype == one.labeled_at.dtype == torch.int64


@pytest.mark.parametrize("kind", ["whole responses", "prompts too", "parts of responses"])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_python_looks_at_responses_and_arrays_at_their_tokens(kind, share_prompts):
    def work(length):
        K = 1 if kind == "prompts too" else 4
        labeled = [[[(1, 3), (4, length)]] * K] * 6 if kind == "parts of responses" else None
        options = {"label_prompts": kind == "prompts too", "labeled": labeled}
        rows = Packing(20 * length, share_prompts)
        return instructions(
            lambda: pack([[5] * length] * 6, [[[5] * length] * K] * 6, rows, **options)
        )

    work(10)  # whatever a first call sets up
    assert work(1000) <= 1.02 * work(10)


@pytest.mark.parametrize(
    "work",
    [
        lambda sizes: first_fit_decreasing(sizes, 100),  # a bin for each
        lambda sizes: balanced(sizes, len(sizes)),
        lambda sizes: deal([sizes], len(sizes)),
    ],
)
def test_four_times_the_groups_are_little_more_than_four_times_the_work(work):
    few, many = (instructions(lambda n=n: work([51 + i % 40 for i in range(n)])) for n in (64, 256))
    assert many <= 6 * few


def test_labeled_prompts_leave_out_the_first_token():
    (row,) = pack([[1, 2, 3], [4]], [[[5]], [[6, 7]]], Packing(7), label_prompts=True)
    assert row.input_ids.tolist() == [[1, 2, 3, 5, 4, 6, 7]]
    assert row.labels.tolist() == [2, 3, 5, 6, 7]
    assert row.labeled_at.tolist() == [0, 1, 2, 4, 5]
    assert row.labeled_lengths == (3, 2)
    assert row.ends_at.tolist() == [3, 6]


@few
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 40))
def test_by_group_gives_values_back_as_the_responses_were_given(lengths, tokens_per_row):
    responses = [[[s] * length, [s]] for s, length in enumerate(lengths)]
    rows = pack([[9]] * len(lengths), responses, Packing(tokens_per_row))
    values = [
        row.input_ids[0][row.ends_at] * 2 + torch.arange(2).repeat(len(row.groups)) for row in rows
    ]
    assert by_group(rows, values).tolist() == [[2 * s, 2 * s + 1] for s in range(len(lengths))]


def test_a_group_that_is_too_long_has_a_row_of_its_own():
    rows = pack([[1], [2], [3]], [[[4]], [[5] * 9], [[6]]], Packing(5), groups=[10, 11, 12])
    assert [row.groups for row in rows] == [(11,), (10, 12)]
    assert [row.responses_per_prompt for row in rows] == [1, 1]
    assert [row.tokens for row in rows] == [10, 4]
    assert efficiency(rows, 5) == 14 / 15
    assert efficiency(rows[1:], 5) == 4 / 5


def test_what_cannot_be_packed_is_refused():
    cases = [
        ([[1], []], [[[1]], [[2]]], r"group 1 has 0 prompt tokens and responses of \[1\]"),
        (
            [[1], [1, 2]],
            [[[1]], [[2, 3], []]],
            r"group 1 has 2 prompt tokens and responses of \[2, 0\]",
        ),
        ([[1]], [[]], r"group 0 has 1 prompt tokens and responses of \[\]"),
        ([[1], [2]], [[[3]]], "zip"),
    ]
    for prompts, responses, message in cases:
        with pytest.raises(ValueError, match=message):
            pack(prompts, responses, Packing(10))
    with pytest.raises(ValueError, match="group 0 has 2 responses; a labeled prompt has one"):
        pack([[1]], [[[2], [3]]], Packing(10), label_prompts=True)
    with pytest.raises(ValueError, match="5 groups cannot be split evenly into 2 parts"):
        balanced([1, 2, 3, 4, 5], 2)
    with pytest.raises(ValueError, match="reach beyond its last token"):
        pack([[1], [2]], [[[3], [4]]] * 2, Packing(10), labeled=[[[(0, 1)], [(0, 2)]], None])
    with pytest.raises(TypeError, match="float"):
        pack([[1]], [[[2.5]]], Packing(10))
    rows = pack([[1], [2]], [[[3]], [[4], [5]]], Packing(10))
    assert rows[0].responses_per_prompt is None
    with pytest.raises(ValueError, match="no common shape"):
        by_group(rows, [torch.zeros(3)])


def test_tensors_of_every_kind_arrive_in_one_aligned_copy(monkeypatch):
    tensors = [
        torch.arange(5),
        torch.tensor([True, False, True]),
        torch.empty(0, 3, dtype=torch.int32),
    ]
    tensors += [torch.tensor(2.5), torch.randn(4, 6).T, torch.randn(3).bfloat16()]
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *sizes, pin_memory, **options: empty(*sizes, **options)
    )
    arrived = upload(tensors, torch.device("cpu"))
    assert len({tensor.untyped_storage().data_ptr() for tensor in arrived}) == 1
    for tensor, before in zip(arrived, tensors, strict=True):
        assert tensor.dtype == before.dtype
        assert torch.equal(tensor, before)
        assert tensor.storage_offset() * tensor.itemsize % ALIGNMENT == 0


def test_every_tensor_of_a_row_moves_to_a_device():
    row = FOURS.row()
    there = row.to(torch.device("meta"))
    repeats = [tensor for pair in there.segments.shared.repeats for tensor in pair]
    tensors = [
        there.input_ids,
        there.labels,
        there.cu_seqlens,
        there.segments.cu_keys,
        there.segments.shared.own,
    ]
    assert len(repeats) == 6
    assert all(tensor.is_meta for tensor in [*tensors, *repeats])
    assert there.groups == row.groups
    assert torch.equal(there.cu_seqlens_on_host, row.cu_seqlens)
    assert there.to(torch.device("meta")).labels is there.labels
