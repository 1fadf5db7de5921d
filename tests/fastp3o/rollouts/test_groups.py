from fastp3o.rollouts.groups import Group, Prompt, Response, make_prompts
from fastp3o.rollouts.transformers_sampler import cut_after_end

GROUPS = [
    Group(Prompt("x1", [1]), [Response([3], "a", True), Response([4, 4], "b", False), Response([5], "c", True)]),
    Group(Prompt("x2", [2, 2]), [Response([6], "d", True), Response([7], "e", True), Response([8, 8, 8], "f", True)]),
]


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
