"""Whole runs whose reward compares the responses to a prompt."""

import json
from math import exp
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from fastp3o import UserError, train
from fastp3o.evaluation.length_controlled import length_controlled
from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.objectives.config.preferences import DPOConfig
from fastp3o.rewards.comparisons import RelativeReward
from fastp3o.rewards.function import compares_siblings
from tests.fastp3o.runs import (
    assert_equal,
    assert_resumes,
    config,
    metrics,
    weights,
    weights_of_start,
)
from tests.fastp3o.together import together

RUNS = Path(__file__).with_name("runs_of_a_process.py")


def vowels(text: str) -> float:
    return sum(c in "aeiou" for c in text) / 4


def better(prompts, firsts, seconds):
    """P3O's differences of `vowels`, which is within 0 and 1/2 for short responses, as
    probabilities.
    """
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
    assert not torch.equal(
        weights("scores")["model.norm.weight"], weights_of_start(tiny_model)["model.norm.weight"]
    )
    assert metrics("compared")[0]["reward"] == 0
    assert metrics("compared")[0]["reward_answered"] == 1


def test_a_pairs_own_comparison_is_another_weight_than_means_where_they_go_in_circles(
    workplace, tiny_model
):
    for pair_weights in ("means", "comparisons"):
        run(
            tiny_model,
            pair_weights,
            reward=circles,
            responses_per_prompt=4,
            pair_weights=pair_weights,
            updates=1,
        )
    first, second = weights("means"), weights("comparisons")
    assert not torch.equal(first["model.norm.weight"], second["model.norm.weight"])


@pytest.mark.parametrize(
    "objective", ["online_dpo", "online_ipo", "bpo", "nash_md", "rebel", "grpo", "rloo", "ppo"]
)
@pytest.mark.parametrize("comparisons", ["all", "circular"])
def test_every_objective_takes_comparisons(workplace, tiny_model, objective, comparisons):
    changes = {"updates": 1, "responses_per_prompt": 4, "comparisons": comparisons}
    run(tiny_model, "run", OBJECTIVES[objective], reward=circles, **changes)
    assert not torch.equal(
        weights("run")["model.norm.weight"], weights_of_start(tiny_model)["model.norm.weight"]
    )


@pytest.mark.parametrize("objective", ["online_dpo", "online_ipo", "bpo"])
def test_labels_are_those_of_scores_with_the_same_order(workplace, tiny_model, objective):
    for name, reward in (("scores", scores), ("compared", better)):
        run(tiny_model, name, OBJECTIVES[objective], reward=reward, responses_per_prompt=4)
    assert_equal(weights("scores"), weights("compared"))


def test_an_anchor_is_the_same_response_of_the_reference_whenever_its_prompt_comes(
    workplace, tiny_model
):
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


def test_a_function_named_on_the_command_line_compares_and_a_resumed_run_has_the_same_bits(
    workplace, tiny_model
):
    Path("relative.py").write_text(
        "def better(prompts, firsts, seconds, word):\n"
        "    return [0.5 + (a.count('e') - b.count('e')) / 12 for a, b in zip(firsts, seconds)]\n"
    )
    settings = config(
        tiny_model, "run", reward="relative:better", prompts="answers.jsonl", save_every=2
    )
    train(settings)
    assert_resumes(settings)


def evaluated(tiny_model: str, folder: str, reward, **changes) -> list[dict]:
    changes = {"eval_prompts": "answers.jsonl", "eval_every": 2} | changes
    run(tiny_model, folder, reward=reward, **changes)
    return metrics(folder, "eval.jsonl")


def test_a_policy_is_even_with_itself_at_the_start_and_then_wins_what_it_learns(
    workplace, tiny_model
):
    changes = {
        "updates": 16,
        "eval_every": 16,
        "keep_best": "win_rate",
        "responses_per_prompt": 4,
        "kl_coef": 0.0,
    }
    start, *_, last = evaluated(tiny_model, "run", better, eval_responses_per_prompt=4, **changes)
    assert start["win_rate"] == 0.5
    assert start["reward"] == 0
    assert last["win_rate"] > 0.53
    assert last["reward"] == pytest.approx(last["win_rate"] - 0.5, abs=1e-6)
    assert last["win_rate_low"] <= last["win_rate"] <= last["win_rate_high"]
    best = json.loads(Path("run/best/evaluation.json").read_text())
    assert best["win_rate"] == last["win_rate"]


def test_length_control_takes_from_a_win_rate_what_is_length_and_says_where_there_is_nothing_to_take(
    workplace, tiny_model, capsys
):
    """Against itself a policy's responses are as long; those of another model here are shorter at
    some prompts.
    """
    met: list[tuple[float, float]] = []

    def longer(prompts, firsts, seconds):
        values = [
            1 / (1 + exp((len(b) - len(a)) / 9)) for a, b in zip(firsts, seconds, strict=True)
        ]
        met.extend(
            (value, len(a) - len(b)) for value, a, b in zip(values, firsts, seconds, strict=True)
        )
        return values

    alone, *_ = evaluated(tiny_model, "alone", longer, updates=2)
    assert "win_rate_length_controlled" not in alone
    assert (
        "no win_rate_length_controlled: responses differ in length from the rival's by the same"
        in capsys.readouterr().out
    )
    met.clear()
    start, *_ = evaluated(
        tiny_model, "run", longer, rival=shifted(tiny_model), updates=2, eval_responses_per_prompt=3
    )
    evaluated_first = met[1 : 1 + 8 * 3]  # after the trial before the run
    assert start["win_rate"] == pytest.approx(
        sum(value for value, _ in evaluated_first) / 24, abs=1e-6
    )
    preferred, lengths = (np.array(one) for one in zip(*evaluated_first, strict=True))
    assert start["win_rate_length_controlled"] == pytest.approx(
        length_controlled(preferred, lengths), abs=1e-6
    )


def test_missing_verdicts_count_for_nothing_in_win_rates(workplace, tiny_model):
    asked = []

    def partly(prompts, firsts, seconds, word):
        asked.extend(word)
        return [None if one == "tree" else 0.75 for one in word]

    changes = {"prompts": "answers.jsonl", "rival": shifted(tiny_model)}
    start, *_ = evaluated(tiny_model, "run", partly, **changes)
    assert "tree" in asked
    assert start["win_rate"] == pytest.approx(0.75)
    assert start["reward"] == pytest.approx(0.25 * 7 / 8)


def test_a_named_rival_gives_scores_a_win_rate_and_sums_one_of_their_totals(workplace, tiny_model):
    rival = shifted(tiny_model)
    start, _ = evaluated(tiny_model, "scores", scores, rival=rival, updates=2)
    assert {"win_rate", "win_rate_low", "win_rate_high"} <= start.keys()
    without, _ = evaluated(tiny_model, "without", scores, updates=2)
    assert "win_rate" not in without
    assert {name: start[name] for name in without} == without
    several, _ = evaluated(tiny_model, "several", [scores, better], rival=rival, updates=2)
    assert several["win_rate"] == start["win_rate"]
    assert several["win_rate/better"] == pytest.approx(several["reward/better"] + 0.5, abs=1e-6)
    assert "win_rate/scores" not in several


def test_a_function_that_compares_siblings_meets_a_rivals_in_evaluations(workplace, tiny_model):
    sizes = []

    @compares_siblings
    def share(prompts, responses):
        values = torch.tensor([sum(map(ord, response)) for response in responses]).view(-1, 4)
        sizes.append(len(values))
        return (values[:, :, None] > values[:, None, :]).float().mean(2).flatten()

    start, last = evaluated(tiny_model, "run", share, responses_per_prompt=4, updates=2)
    assert sizes[0] == 1  # the check before the run
    assert last["reward"] != start["reward"]
    assert 0 < start["win_rate"] < 1


def test_a_reward_that_compares_evaluates_fixed_preferences_against_the_start(
    workplace, tiny_model
):
    settings = DPOConfig(
        model=tiny_model,
        output_dir="dpo",
        train_data="preferences.jsonl",
        epochs=1,
        batch_size=4,
        learning_rate=1e-3,
        eval_prompts="prompts.jsonl",
        max_response_tokens=6,
        precision="fp32",
        report_to="none",
    )
    train(settings, reward=better)
    start, *_ = metrics("dpo", "eval.jsonl")
    assert start["win_rate"] == 0.5


def shifted(tiny_model: str) -> str:
    """Another model with the same vocabulary."""
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    model.save_pretrained("rival")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained("rival")
    return "rival"


def test_two_processes_compare_what_one_does(workplace, tiny_model):
    """With a model of the reference that is sampled, a rival, and a judge that both processes hold
    a part of.
    """
    Path("comparing.py").write_text(
        "def better(prompts, firsts, seconds):\n"
        "    return [0.5 + (sum(map(ord, a)) % 64 - sum(map(ord, b)) % 64) / 128 for a, b in zip(firsts, seconds)]\n"
    )
    flags = [
        "p3o",
        "--model",
        tiny_model,
        "--prompts",
        "prompts.jsonl",
        "--eval_prompts",
        "prompts.jsonl",
    ]
    flags += [
        "--max_response_tokens",
        "6",
        "--updates",
        "2",
        "--prompts_per_update",
        "4",
        "--report_to",
        "none",
    ]
    flags += [
        "--prompts_per_minibatch",
        "2",
        "--learning_rate",
        "3e-4",
        "--precision",
        "fp32",
        "--eval_limit",
        "5",
    ]
    runs = {
        "anchor": ["--reward", "comparing:better", "--comparisons", "anchor"],
        "judge": [
            "--reward",
            "judge,comparing:better",
            "--judge_model",
            tiny_model,
            "--pair_weights",
            "comparisons",
        ],
    }
    for folder, processes in (("one", 1), ("two", 2)):
        arguments = [
            [*flags, *further, "--output_dir", f"{folder}/{name}"] for name, further in runs.items()
        ]
        done = together(
            RUNS, *[part for run in arguments for part in ("+", *run)], processes=processes
        )
        assert done.returncode == 0, done.stdout
    for name in runs:
        for key, value in weights(f"one/{name}").items():
            torch.testing.assert_close(weights(f"two/{name}")[key], value, rtol=0, atol=2e-5)
        for one, two in zip(
            metrics(f"one/{name}", "eval.jsonl"), metrics(f"two/{name}", "eval.jsonl"), strict=True
        ):
            assert two == pytest.approx(one, abs=1e-4)


@pytest.mark.parametrize("comparisons", ["circular", "anchor"])
def test_a_choice_of_pairs_is_refused_where_no_reward_judges_pair_by_pair(
    workplace, tiny_model, comparisons
):
    class AllAtOnce(RelativeReward):
        def matrix(self, groups):
            return torch.zeros(len(groups), 2, 2)

    expected = (
        f"--comparisons {comparisons} has no effect without a reward that judges pair by pair"
    )
    for reward, why in (
        (scores, "scores each response alone"),
        (AllAtOnce(), "all comparisons from one pass"),
    ):
        with pytest.raises(UserError, match=f"{expected}.*{why}"):
            run(tiny_model, "refused", reward=reward, comparisons=comparisons)
    run(tiny_model, "mixed", reward=[scores, better], comparisons=comparisons, updates=1)


@pytest.mark.parametrize(("pair_weights", "again"), [("means", 2), ("comparisons", 0)])
def test_a_circle_is_sampled_again_only_where_the_loss_reads_row_means(
    workplace, tiny_model, pair_weights, again
):
    class Circle(RelativeReward):
        def matrix(self, groups):
            return torch.tensor([[0, 0.5, -0.5], [-0.5, 0, 0.5], [0.5, -0.5, 0]]).repeat(
                len(groups), 1, 1
            )

    changes = {
        "responses_per_prompt": 3,
        "dynamic_sampling": 2,
        "updates": 1,
        "pair_weights": pair_weights,
    }
    run(tiny_model, "run", reward=Circle(), **changes)
    assert metrics("run")[0]["sampled_again"] == again


@pytest.mark.parametrize("pair_weights", ["means", "comparisons"])
def test_ties_alone_are_sampled_again_whatever_the_loss_reads(workplace, tiny_model, pair_weights):
    class Ties(RelativeReward):
        def matrix(self, groups):
            return torch.zeros(len(groups), 3, 3)

    changes = {
        "responses_per_prompt": 3,
        "dynamic_sampling": 2,
        "updates": 1,
        "pair_weights": pair_weights,
    }
    run(tiny_model, "run", reward=Ties(), **changes)
    assert metrics("run")[0]["sampled_again"] == 2
