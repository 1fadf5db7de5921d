from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastp3o.calls.function import FunctionError
from fastp3o.errors import UserError
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.objectives.config.preferences import NashMDConfig, OnlineDPOConfig
from fastp3o.run.manifest import ResumeError
from fastp3o.runtime.finiteness import NotFiniteError
from fastp3o.runtime.precision import choose_precision
from fastp3o.training import sft
from fastp3o.training.loop import train
from tests.fastp3o.runs import (
    assert_equal,
    assert_resumes,
    config,
    metrics,
    weights,
    weights_of_start,
)
from tests.fastp3o.training.test_supervised import sft_config


def test_a_run_leaves_a_model_that_transformers_loads_and_raises_the_reward(workplace, tiny_model):
    train(
        config(
            tiny_model,
            "run",
            updates=30,
            eval_prompts="prompts.jsonl",
            eval_every=10,
            samples_every=15,
        )
    )
    steps = metrics("run")
    assert [step["step"] for step in steps] == list(range(1, 31))
    evaluations = metrics("run", "eval.jsonl")
    assert [evaluation["step"] for evaluation in evaluations] == [0, 10, 20, 30]
    assert evaluations[0]["kl"] == 0
    assert sum(s["reward"] for s in steps[-5:]) > sum(s["reward"] for s in steps[:5])
    end = AutoModelForCausalLM.from_pretrained("run/model").state_dict()
    assert not any(torch.equal(end[n], w) for n, w in weights_of_start(tiny_model).items())
    AutoTokenizer.from_pretrained("run/model")


def test_the_same_seed_gives_the_same_run_and_other_prompts_are_refused(workplace, tiny_model):
    train(config(tiny_model, "first"))
    train(config(tiny_model, "second"))
    train(config(tiny_model, "third", seed=1))
    assert metrics("first") == metrics("second")
    assert_equal(weights("first"), weights("second"))
    assert metrics("first") != metrics("third")
    source = Path("prompts.jsonl")
    source.write_text(source.read_text().replace("tree", "trees"))
    with pytest.raises(ResumeError, match=r"--prompts \(prompts.jsonl\)"):
        train(config(tiny_model, "first", updates=5, resume=True))


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"prompts_per_minibatch": 8}, {"tokens_per_row": 1}),
        # Metrics that count prompts are weighted by tokens with token clipping: no response may end
        # early.
        ({"prompts_per_minibatch": 8, "clipping": "token"}, {"tokens_per_row": 1}),
        ({}, {"share_prompts": False}),
        ({}, {"offload": True, "gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_microbatches_packing_and_what_saves_memory_do_not_matter(
    workplace, tiny_model, settings, changes
):
    for folder, own in (("plain", {}), ("changed", changes)):
        train(config(tiny_model, folder, updates=2, **settings, **own))
    for plain, changed in zip(metrics("plain"), metrics("changed"), strict=True):
        names = plain.keys() - {"packing_efficiency", "ratio/noise"}
        assert changed.keys() == plain.keys()
        assert {n: changed[n] for n in names} == pytest.approx(
            {n: plain[n] for n in names}, rel=2e-3, abs=2e-4
        )
    first, second = weights("plain"), weights("changed")
    assert all(torch.allclose(first[name], second[name], atol=2e-4) for name in first)


COMPILED = pytest.param({"compile_layers": True}, marks=pytest.mark.compiled)


@pytest.mark.parametrize(
    "changes", [{"precision": "bf16"}, {"precision": "fp16"}, COMPILED], ids=str
)
def test_half_precision_and_compiled_layers_train_and_resume_exactly(
    workplace, tiny_model, changes
):
    torch.compiler.reset()
    train(run := config(tiny_model, "run", save_every=2, **changes))
    assert_resumes(run)
    if changes == {"precision": "fp16"}:
        assert all(step["loss_scale"] >= 1 for step in metrics("run"))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compiled)])
@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast", "bf16", "fp16"])
def test_the_first_ratio_is_exactly_one_and_rounding_is_warned_of(
    workplace, tiny_model, precision, compiled, capsys
):
    settings = {
        "precision": precision,
        "updates": 1,
        "inner_epochs": 1,
        "prompts_per_minibatch": 8,
        "clip_range": 1e-4,
    }
    train(config(tiny_model, "run", compile_layers=compiled, **settings))
    (step,) = metrics("run")
    assert step["ratio_mean"] == step["ratio_max"] == 1
    assert step["clip_fraction"] == 0
    printed = capsys.readouterr().out
    assert ("rounding alone moves log-ratios" in printed) == (precision != "fp32")
    slow = choose_precision(precision, "fp32").slow_on_cpu and not torch.cuda.is_available()
    assert ("fp32 would be faster" in printed) == slow


@pytest.mark.parametrize(
    ("function", "changes", "error"),
    [
        ("stops_on_third_call", {}, SystemExit),
        ("stops_on_third_call", {"reward_scaling": "absolute"}, SystemExit),
        ("stops_on_third_call", {"precision": "fp16"}, SystemExit),
        ("nan_on_third_call", {}, NotFiniteError),
        ("raises_on_third_call", {"save_every": 2}, FunctionError),
    ],
)
def test_a_run_that_ends_within_an_update_goes_on_before_it(
    workplace, tiny_model, function, changes, error
):
    settings = {"reward": f"rewards_for_tests:{function}"} | changes
    with pytest.raises(error) as ended:
        train(config(tiny_model, "run", **settings))
    # The rewards of update 3 had entered the deviation that rewards are divided by.
    assert metrics("run")[-1]["step"] == 2
    if error is not SystemExit:
        assert "update 3: " in str(ended.value)
        AutoModelForCausalLM.from_pretrained("run/stopped-in-000003/model")
    train(config(tiny_model, "run", resume=True, **settings))
    train(config(tiny_model, "whole", **(settings | {"reward": "rewards_for_tests:vowels"})))
    assert metrics("run") == metrics("whole")
    assert_equal(weights("run"), weights("whole"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"learning_rate": 1e30}, "the loss or the gradient is NaN or infinite .*No state was"),
        (
            {"reward": "rewards_for_tests:huge"},
            "update 1: a difference or a sum of rewards is NaN or infinite",
        ),
    ],
)
def test_numbers_that_are_not_finite_stop_the_run(workplace, tiny_model, changes, says):
    with pytest.raises(NotFiniteError, match=says):
        train(config(tiny_model, "run", **changes))


def test_several_rewards_are_logged_and_their_sum_is_trained_on(workplace, tiny_model):
    """The first asserts that columns travel with their prompts; what it adds for the prompt
    cancels.
    """
    twice = {
        "reward": "rewards_for_tests:answered,rewards_for_tests:vowels",
        "reward_weights": "2,0",
        "updates": 2,
    }
    twice |= {
        "prompts": "answers.jsonl",
        "eval_prompts": "answers.jsonl",
        "gold_reward": "rewards_for_tests:answered",
    }
    train(config(tiny_model, "two", **twice, length_penalty=0.5))
    train(
        config(tiny_model, "one", reward="rewards_for_tests:varied", updates=2, length_penalty=0.25)
    )
    # Rewards are divided by their deviation.
    assert_equal(weights("two"), weights("one"))
    for step in metrics("two"):
        assert step["reward"] == pytest.approx(2 * step["reward/answered"] - step["penalty/length"])
        assert step["penalty/length"] == pytest.approx(step["response_length"] / 2)
    last = metrics("two", "eval.jsonl")[-1]
    assert (
        last["reward"]
        == pytest.approx(2 * last["reward/answered"])
        == pytest.approx(2 * last["gold"])
    )


def different(first: str, second: str) -> bool:
    return any(
        not torch.equal(weight, weights(second)[name]) for name, weight in weights(first).items()
    )


def test_an_evaluation_at_the_end_is_that_of_the_saved_model(workplace, tiny_model):
    for folder, rate in (("run", 0.5), ("none", 0.0)):
        sft.train(sft_config(tiny_model, folder, epochs=4, lora_rank=2, lora_dropout=rate))
    assert different("run", "none")
    sft.train(sft_config("run/model", "again", epochs=1))
    end, begin = metrics("run", "eval.jsonl")[-1], metrics("again", "eval.jsonl")[0]
    assert end["loss"] == pytest.approx(begin["loss"], abs=1e-5)


def test_objectives_with_ratios_refuse_it_and_others_train(workplace, tiny_model):
    settings = {"lora_rank": 2, "lora_dropout": 0.5, "updates": 2}
    with pytest.raises(UserError, match="--lora_dropout would make ratios random"):
        config(tiny_model, "run", P3OConfig, **settings)
    config(tiny_model, "nash", NashMDConfig, **settings, reference=tiny_model)
    train(config(tiny_model, "run", OnlineDPOConfig, **settings))
    train(config(tiny_model, "none", OnlineDPOConfig, **(settings | {"lora_dropout": 0.0})))
    assert different("run", "none")
    # The first round is sampled, and its log-probs are computed, without it.
    first, plain = metrics("run")[0], metrics("none")[0]
    assert all(
        first[name] == plain[name]
        for name in ("reward", "kl", "entropy", "sampler_gap", "response_length")
    )
