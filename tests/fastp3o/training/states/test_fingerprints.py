from types import SimpleNamespace

from fastp3o.training.states.fingerprints import fingerprints_of


def of(**names: str) -> dict[str, str]:
    return fingerprints_of(SimpleNamespace(**names), {})


def test_one_reward_has_the_name_of_its_option_and_several_have_their_own(workplace, tiny_model):
    function, model = of(reward="rewards_for_tests:vowels"), of(reward=tiny_model)
    assert function.keys() == {"reward function"}
    assert model.keys() == {"reward"}
    both = of(reward=f"rewards_for_tests:vowels,{tiny_model}", model=tiny_model)
    assert both == {
        "reward rewards_for_tests:vowels function": function["reward function"],
        f"reward {tiny_model}": model["reward"],
        "model": model["reward"],
    }


def test_an_endpoint_may_move_and_must_not_become_a_model(workplace, tiny_model):
    assert of(reward="http://a/score") == of(reward="http://b:8000/score") != of(reward=tiny_model)
