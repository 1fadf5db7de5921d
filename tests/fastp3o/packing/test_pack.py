from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o.packing import pack as packing
from fastp3o.packing.packed_row import ALIGNMENT, upload
from tests.fastp3o.counted import instructions
from tests.fastp3o.models.model_families import FOURS

ids = st.lists(st.integers(0, 99), min_size=1, max_size=7)
many_groups = st.lists(st.tuples(ids, st.lists(ids, min_size=1, max_size=4)), min_size=1, max_size=6)
sizes = st.lists(st.integers(1, 40), max_size=30)
few = settings(max_examples=60, deadline=None)


@few
@given(sizes, st.integers(1, 40))
def test_bins_hold_every_index_once_and_no_more_than_fits(sizes, capacity):
    bins = packing.first_fit_decreasing(sizes, capacity)
    assert sorted(index for indices in bins for index in indices) == list(range(len(sizes)))
    for indices in bins:
        assert indices
        assert len(indices) == 1 or sum(sizes[i] for i in indices) <= capacity
    # No two bins fit into one.
    totals = sorted(sum(sizes[i] for i in indices) for indices in bins)
    assert len(totals) < 2 or totals[0] + totals[1] > capacity
    # The largest go first, into the first bin with room.
    assert packing.first_fit_decreasing([3, 9, 4, 4, 12, 1], 10) == [[4], [1, 5], [2, 3], [0]]


@few
@given(st.integers(1, 5), st.integers(0, 6), st.data())
def test_balanced_parts_are_of_equal_counts_and_near_sums(parts, each, data):
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=parts * each, max_size=parts * each))
    members = packing.balanced(sizes, parts)
    assert [len(part) for part in members] == [each] * parts
    assert sorted(index for part in members for index in part) == list(range(len(sizes)))
    sums = [sum(sizes[i] for i in part) for part in members]
    assert max(sums) - min(sums) <= max(sizes, default=0) - min(sizes, default=0)
    assert packing.balanced([8, 1, 7, 2, 6, 3], 3) == [[0, 1], [2, 3], [4, 5]]


@few
@given(many_groups, st.integers(1, 60), st.booleans())
def test_every_response_token_is_labelled_once_from_the_token_before(groups, tokens_per_row, share_prompts):
    prompts, responses = [prompt for prompt, _ in groups], [group for _, group in groups]
    rows = packing.pack(prompts, responses, packing.Packing(tokens_per_row, share_prompts))
    assert sorted(g for row in rows for g in row.groups) == list(range(len(groups)))
    for row in rows:
        assert row.tokens <= tokens_per_row or len(row.groups) == 1
        assert row.tokens == sum(
            packing.group_tokens(len(prompts[g]), list(map(len, responses[g])), share_prompts=share_prompts)
            for g in row.groups
        )
        sequences = [(prompts[g], response) for g in row.groups for response in responses[g]]  # groups stay whole
        tokens, positions = row.input_ids[0].tolist(), row.position_ids[0].tolist()
        labelled = zip(row.labelled_at.split(row.labelled_lengths), row.labels.split(row.labelled_lengths), strict=True)
        every = zip(sequences, row.ends_at.tolist(), labelled, strict=True)
        for (prompt, response), last, (predicting, labels) in every:
            assert labels.tolist() == response
            assert [tokens[t] for t in predicting.tolist()] == [prompt[-1], *response[:-1]]
            first = len(prompt) - 1
            assert [positions[t] for t in predicting.tolist()] == list(range(first, first + len(response)))
            assert (tokens[last], positions[last]) == (response[-1], len(prompt) + len(response) - 1)
        assert row.cu_seqlens.tolist() == [0, *accumulate(row.labelled_lengths)]
        assert torch.equal(row.cu_seqlens, row.cu_seqlens_on_host)
        assert (row.cu_seqlens.dtype, row.labels.dtype) == (torch.int32, torch.int64)


@few
@given(many_groups, st.booleans())
def test_the_keys_of_a_response_are_its_prompt_and_itself(groups, share_prompts):
    prompts, responses = [prompt for prompt, _ in groups], [group for _, group in groups]
    (row,) = packing.pack(prompts, responses, packing.Packing(1000, share_prompts))
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
    for sequence, key_ids, at, query, key in zip(sequences, ids, positions, queries, keys, strict=True):
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
def test_parts_of_responses_are_labelled_and_an_empty_one_labels_nothing(groups, share_prompts, data):
    prompts, responses = [prompt for prompt, _ in groups], [group for _, group in groups]

    def spans(response):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(response)), max_size=4)))
        return list(zip(cuts[::2], cuts[1::2], strict=False))

    labelled = [None if data.draw(st.booleans()) else [spans(response) for response in group] for group in responses]
    whole, parts = (
        packing.pack(prompts, responses, packing.Packing(20, share_prompts), labelled=one) for one in (None, labelled)
    )
    for row, one in zip(whole, parts, strict=True):
        assert torch.equal(row.input_ids, one.input_ids)
        expected: list[list] = []
        of_responses = [values.split(row.labelled_lengths) for values in (row.labelled_at, row.labels)]
        tokens = zip(*of_responses, strict=True)
        for group in row.groups:
            for k, response in enumerate(responses[group]):
                chosen = [(0, len(response))] if labelled[group] is None else labelled[group][k]
                places = [place for begin, end in chosen for place in range(begin, end)]
                expected.append([values[places].tolist() for values in next(tokens)])
        assert one.labelled_lengths == tuple(len(labels) for _, labels in expected)
        assert one.labelled_at.tolist() == [place for at, _ in expected for place in at]
        assert one.labels.tolist() == [label for _, labels in expected for label in labels]
        assert one.labels.dtype == one.labelled_at.dtype == torch.int64


@pytest.mark.parametrize("kind", ["whole responses", "prompts too", "parts of responses"])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_python_looks_at_responses_and_arrays_at_their_tokens(kind, share_prompts):
    def work(length):
        K = 1 if kind == "prompts too" else 4
        labelled = [[[(1, 3), (4, length)]] * K] * 6 if kind == "parts of responses" else None
        options = {"label_prompts": kind == "prompts too", "labelled": labelled}
        rows = packing.Packing(20 * length, share_prompts)
        return instructions(lambda: packing.pack([[5] * length] * 6, [[[5] * length] * K] * 6, rows, **options))

    work(10)  # whatever a first call sets up
    assert work(1000) <= 1.02 * work(10)


@pytest.mark.parametrize(
    "work",
    [
        lambda sizes: packing.first_fit_decreasing(sizes, 100),  # a bin for each
        lambda sizes: packing.balanced(sizes, len(sizes)),
        lambda sizes: packing.deal([sizes], len(sizes)),
    ],
)
def test_four_times_the_groups_are_little_more_than_four_times_the_work(work):
    few, many = (instructions(lambda n=n: work([51 + i % 40 for i in range(n)])) for n in (64, 256))
    assert many <= 6 * few


def test_labelled_prompts_leave_out_the_first_token():
    (row,) = packing.pack([[1, 2, 3], [4]], [[[5]], [[6, 7]]], packing.Packing(7), label_prompts=True)
    assert row.input_ids.tolist() == [[1, 2, 3, 5, 4, 6, 7]]
    assert row.labels.tolist() == [2, 3, 5, 6, 7]
    assert row.labelled_at.tolist() == [0, 1, 2, 4, 5]
    assert row.labelled_lengths == (3, 2)
    assert row.ends_at.tolist() == [3, 6]


@few
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 40))
def test_by_group_gives_values_back_as_the_responses_were_given(lengths, tokens_per_row):
    responses = [[[s] * length, [s]] for s, length in enumerate(lengths)]
    rows = packing.pack([[9]] * len(lengths), responses, packing.Packing(tokens_per_row))
    values = [row.input_ids[0][row.ends_at] * 2 + torch.arange(2).repeat(len(row.groups)) for row in rows]
    assert packing.by_group(rows, values).tolist() == [[2 * s, 2 * s + 1] for s in range(len(lengths))]


def test_a_group_that_is_too_long_has_a_row_of_its_own():
    rows = packing.pack([[1], [2], [3]], [[[4]], [[5] * 9], [[6]]], packing.Packing(5), groups=[10, 11, 12])
    assert [row.groups for row in rows] == [(11,), (10, 12)]
    assert [row.responses_per_prompt for row in rows] == [1, 1]
    assert [row.tokens for row in rows] == [10, 4]
    assert packing.efficiency(rows, 5) == 14 / 15
    assert packing.efficiency(rows[1:], 5) == 4 / 5


def test_what_cannot_be_packed_is_refused():
    cases = [
        ([[1], []], [[[1]], [[2]]], r"group 1 has 0 prompt tokens and responses of \[1\]"),
        ([[1], [1, 2]], [[[1]], [[2, 3], []]], r"group 1 has 2 prompt tokens and responses of \[2, 0\]"),
        ([[1]], [[]], r"group 0 has 1 prompt tokens and responses of \[\]"),
        ([[1], [2]], [[[3]]], "zip"),
    ]
    for prompts, responses, message in cases:
        with pytest.raises(ValueError, match=message):
            packing.pack(prompts, responses, packing.Packing(10))
    with pytest.raises(ValueError, match="group 0 has 2 responses; a labelled prompt has one"):
        packing.pack([[1]], [[[2], [3]]], packing.Packing(10), label_prompts=True)
    with pytest.raises(ValueError, match="5 groups cannot be split evenly into 2 parts"):
        packing.balanced([1, 2, 3, 4, 5], 2)
    with pytest.raises(ValueError, match="reach beyond its last token"):
        packing.pack([[1], [2]], [[[3], [4]]] * 2, packing.Packing(10), labelled=[[[(0, 1)], [(0, 2)]], None])
    with pytest.raises(TypeError, match="float"):
        packing.pack([[1]], [[[2.5]]], packing.Packing(10))
    rows = packing.pack([[1], [2]], [[[3]], [[4], [5]]], packing.Packing(10))
    assert rows[0].responses_per_prompt is None
    with pytest.raises(ValueError, match="no common shape"):
        packing.by_group(rows, [torch.zeros(3)])


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 1000))
def test_every_pass_takes_every_example_once_in_another_order(batch_size, total, seed):
    steps = -(-2 * total // batch_size)
    order = {"batch_size": batch_size, "total": total, "seed": seed}
    examples = [example for step in range(steps) for example in packing.examples_of_step(step, **order)]
    assert len(examples) == steps * batch_size
    assert sorted(examples[:total]) == sorted(examples[total : 2 * total]) == list(range(total))
    first, second, third = (packing.examples_of_step(step, batch_size=30, total=30, seed=0) for step in range(3))
    assert first != second != third


def test_a_pass_is_shuffled_once_also_where_others_are_looked_at_meanwhile(monkeypatch):
    """Rollouts may be some updates ahead; texts of a pretraining mix have passes of their own; the minibatches of each
    inner epoch are shuffled in between.
    """
    counted, shuffle = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *args, **options: counted.append(args) or shuffle(*args, **options))
    packing.order_of_pass.cache_clear()
    for step in range(20):
        for ahead in (0, 3):
            packing.examples_of_step(step + ahead, batch_size=3, total=30, seed=1)
            packing.examples_of_step(step + ahead, batch_size=2, total=31, seed=2)
        for epoch in range(8):
            packing.shuffled(4, packing.derived_seed(step, epoch))
    assert [args for args in counted if args != (4,)] == [(30,), (31,), (30,), (31,), (30,)]


def test_seeds_differ_by_every_part():
    assert len({packing.derived_seed(a, b) for a in range(20) for b in range(20)}) == 400


@given(st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=12), min_size=1, max_size=6), st.integers(1, 6))
def test_every_group_is_dealt_once_and_evenly(steps, processes):
    before = [0] * processes
    for sizes, parts in zip(steps, packing.deal(steps, processes), strict=True):
        assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
        assert processes > 1 or parts == [list(range(len(sizes)))]
        tokens = [sum(sizes[index] for index in part) for part in parts]
        # No process has more than another by more than one group.
        assert max(tokens) - min(tokens) <= max(sizes)
        assert all(parts) or len(sizes) < processes
        if len(sizes) < processes:
            pairs = list(zip(before, parts, strict=True))
            assert max(b for b, part in pairs if part) <= min(b for b, part in pairs if not part)
        before = [b + t for b, t in zip(before, tokens, strict=True)]


def test_tensors_of_every_kind_arrive_in_one_aligned_copy(monkeypatch):
    tensors = [torch.arange(5), torch.tensor([True, False, True]), torch.empty(0, 3, dtype=torch.int32)]
    tensors += [torch.tensor(2.5), torch.randn(4, 6).T, torch.randn(3).bfloat16()]
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **options: empty(*sizes, **options))
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
    tensors = [there.input_ids, there.labels, there.cu_seqlens, there.segments.cu_keys, there.segments.shared.own]
    assert len(repeats) == 6
    assert all(tensor.is_meta for tensor in [*tensors, *repeats])
    assert there.groups == row.groups
    assert torch.equal(there.cu_seqlens_on_host, row.cu_seqlens)
    assert there.to(torch.device("meta")).labels is there.labels
