"""Whole runs whose reward compares the responses to a prompt."""

from pathlib import Path

import pytest
import torch

from fastp3o import UserError, train
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.objectives.online import OBJECTIVES
from tests.fastp3o.runs import assert_equal, assert_resumes, config, metrics, weights, weights_of_start


def vowels(text: str) -> float:
    return sum(c in "aeiou" for c in text) / 4


def better(prompts, firsts, seconds):
    """P3O's differences of `vowels`, which is within 0 and 1/2 for short responses, as probabilities."""
    return [0.5 + (vowels(a) - vowels(b)) / 4 for a, b in zip(firsts, seconds, strict=True)]


def scores(prompts, responses):
    return [vowels(response) / 4 for response in responses]


def circles(prompts, firsts, seconds):
    """Each letter is beaten by the next third of the alphabet: no score orders them."""
    ranks = [[sum(map(ord, text)) % 3 for text in texts] for texts in (firsts, seconds)]
    return [(0.5, 1.0, 0.0)[(a - b) % 3] for a, b in zip(*ranks, strict=True)]


def run(tiny_model: str, folder: str, config_class=P3OConfig, reward="relative:better", **changes):
    settings = config(tiny_model, folder, config_class, reward="", **changes)
    return train(settings, reward=reward)


@pytest.mark.parametrize("pair_weights", ["means", "comparisons"])
def test_differences_of_scores_train_the_bits_of_the_scores(workplace, tiny_model, pair_weights):
    run(tiny_model, "scores", reward=scores)
    run(tiny_model, "compared", reward=better, pair_weights=pair_weights)
    assert_equal(weights("scores"), weights("compared"))
    assert not torch.equal(weights("scores")["model.norm.weight"], weights_of_start(tiny_model)["model.norm.weight"])
    assert metrics("compared")[0]["reward"] == 0
    assert metrics("compared")[0]["reward_answered"] == 1


def test_a_pairs_own_comparison_is_another_weight_than_means_where_they_go_in_circles(workplace, tiny_model):
    for pair_weights in ("means", "comparisons"):
        run(tiny_model, pair_weights, reward=circles, responses_per_prompt=4, pair_weights=pair_weights, updates=1)
    first, second = weights("means"), weights("comparisons")
    assert not torch.equal(first["model.norm.weight"], second["model.norm.weight"])


@pytest.mark.parametrize("objective", ["online_dpo", "online_ipo", "bpo", "nash_md", "rebel", "grpo", "rloo", "ppo"])
@pytest.mark.parametrize("comparisons", ["all", "circular"])
def test_every_objective_takes_comparisons(workplace, tiny_model, objective, comparisons):
    changes = {"updates": 1, "responses_per_prompt": 4, "comparisons": comparisons}
    run(tiny_model, "run", OBJECTIVES[objective], reward=circles, **changes)
    assert not torch.equal(weights("run")["model.norm.weight"], weights_of_start(tiny_model)["model.norm.weight"])


@pytest.mark.parametrize("objective", ["online_dpo", "online_ipo", "bpo"])
def test_labels_are_those_of_scores_with_the_same_order(workplace, tiny_model, objective):
    for name, reward in (("scores", scores), ("compared", better)):
        run(tiny_model, name, OBJECTIVES[objective], reward=reward, responses_per_prompt=4)
    assert_equal(weights("scores"), weights("compared"))


def test_an_anchor_is_the_same_response_of_the_reference_whenever_its_prompt_comes(workplace, tiny_model):
    seen: dict[str, set[str]] = {}

    def noted(prompts, firsts, seconds):
        for prompt, second in zip(prompts, seconds, strict=True):
            seen.setdefault(prompt, set()).add(second)
        return better(prompts, firsts, seconds)

    changes = {"comparisons": "anchor", "kl_coef": 0.0, "responses_per_prompt": 3}
    run(tiny_model, "run", reward=noted, **changes)
    tried = {prompt: others - {"other"} for prompt, others in seen.items()}
    assert len(tried) == 8
    assert all(len(others) == 1 for others in tried.values())
    assert len(set.union(*tried.values())) > 1
    # The reference is there, though the loss does not read it.
    assert metrics("run")[0]["kl"] == pytest.approx(0, abs=1e-4)
    with pytest.raises(UserError, match="--comparisons anchor samples a reference of its own"):
        config(tiny_model, "run", lora_rank=2, **changes)


def test_a_function_named_on_the_command_line_compares_and_a_resumed_run_has_the_same_bits(workplace, tiny_model):
    Path("relative.py").write_text(
        "def better(prompts, firsts, seconds, word):\n"
        "    return [0.5 + (a.count('e') - b.count('e')) / 12 for a, b in zip(firsts, seconds)]\n"
    )
    settings = config(tiny_model, "run", reward="relative:better", prompts="answers.jsonl", save_every=2)
    train(settings)
    assert_resumes(settings)
