from fastp3o.rollouts.rollouts import Rollouts


def test_prompts_and_their_responses_side_by_side():
    rollouts = Rollouts(
        prompts=["x1", "x2"],
        prompt_ids=[[1], [2, 2]],
        responses=[["a", "b", "c"], ["d", "e", "f"]],
        response_ids=[[[3], [4, 4], [5]], [[6], [7], [8, 8, 8]]],
        finished=[[True] * 3] * 2,
    )
    assert (len(rollouts), rollouts.responses_per_prompt) == (2, 3)
    assert rollouts.texts() == (["x1", "x1", "x1", "x2", "x2", "x2"], ["a", "b", "c", "d", "e", "f"])
    assert rollouts.response_lengths == [[1, 2, 1], [1, 1, 3]]
