from fastp3o.rollouts.groups import Group, Prompt, Response, finished, lengths, make_prompts, texts, token_ids
from fastp3o.rollouts.transformers_sampler import cut_after_end

GROUPS = [
    Group(Prompt("x1", [1]), [Response([3], "a", True), Response([4, 4], "b", False), Response([5], "c", True)]),
    Group(Prompt("x2", [2, 2]), [Response([6], "d", True), Response([7], "e", True), Response([8, 8, 8], "f", True)]),
]


def test_prompts_and_their_responses_side_by_side():
    assert texts(GROUPS) == (["x1", "x1", "x1", "x2", "x2", "x2"], ["a", "b", "c", "d", "e", "f"])
    assert token_ids(GROUPS) == ([[1], [2, 2]], [[[3], [4, 4], [5]], [[6], [7], [8, 8, 8]]])
    assert lengths(GROUPS).tolist() == [[1, 2, 1], [1, 1, 3]]
    assert finished(GROUPS).tolist() == [[True, False, True], [True, True, True]]


def test_prompts_have_their_numbers_and_the_columns_of_their_records():
    examples = {"prompt": ["x", "y"], "prompt_ids": [[1], [2]], "given": ["", ""], "answer": ["[1]", '"two"']}
    assert make_prompts(examples, [5, 3]) == [
        Prompt("x", [1], 5, {"answer": [1]}),
        Prompt("y", [2], 3, {"answer": "two"}),
    ]
    assert [prompt.number for prompt in make_prompts(examples)] == [0, 1]


def test_a_response_ends_at_its_first_end():
    assert cut_after_end([5, 2, 6, 2], {2}) == [5, 2]
    assert cut_after_end([5, 6], {2}) == [5, 6]
