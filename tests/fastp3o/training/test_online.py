import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from fastp3o.endpoint import EndpointError
from fastp3o.processes import NotFiniteError
from fastp3o.run.manifest import ResumeError
from fastp3o.run.signals import StoppedError
from fastp3o.training.loop import train
from tests.fastp3o.local_server import Reply, serving
from tests.fastp3o.runs import assert_equal, config, copy_at_save_before, metrics, weights, weights_of_start


def test_a_run_leaves_a_model_that_transformers_loads_and_raises_the_reward(workplace, tiny_model):
    train(config(tiny_model, "run", updates=30, eval_prompts="prompts.jsonl", eval_every=10, samples_every=15))
    steps = metrics("run")
    assert [step["step"] for step in steps] == list(range(1, 31))
    for name in (
        "reward",
        "reward_difference",
        "kl",
        "ratio_mean",
        "ratio_max",
        "clip_fraction",
        "entropy",
        "grad_norm",
    ):
        assert all(isinstance(step[name], float) for step in steps), name
    evaluations = metrics("run", "eval.jsonl")
    assert [evaluation["step"] for evaluation in evaluations] == [0, 10, 20, 30]
    assert evaluations[0]["kl"] == 0
    assert sum(s["reward"] for s in steps[-5:]) > sum(s["reward"] for s in steps[:5])
    end = AutoModelForCausalLM.from_pretrained("run/model").state_dict()
    assert not any(torch.equal(end[n], w) for n, w in weights_of_start(tiny_model).items())
    AutoTokenizer.from_pretrained("run/model")


def test_the_same_seed_gives_the_same_run(workplace, tiny_model):
    train(config(tiny_model, "first"))
    train(config(tiny_model, "second"))
    train(config(tiny_model, "third", seed=1))
    assert metrics("first") == metrics("second")
    assert_equal(weights("first"), weights("second"))
    assert metrics("first") != metrics("third")


def test_a_resumed_run_is_the_uninterrupted_one(workplace, tiny_model):
    evaluated = {"eval_prompts": "prompts.jsonl", "eval_every": 1, "lr_schedule": "cosine"}
    train(config(tiny_model, "whole", **evaluated))
    # The calls: an evaluation at 0, then an update and an evaluation each; the fifth raises KeyboardInterrupt.
    interrupted = {"reward": "rewards_for_tests:fails_on_fifth_call"} | evaluated
    with pytest.raises(StoppedError):
        train(config(tiny_model, "resumed", **interrupted))
    assert metrics("resumed")[-1]["step"] == 2
    train(config(tiny_model, "resumed", **interrupted, resume=True))
    assert metrics("whole") == metrics("resumed")
    assert metrics("whole", "eval.jsonl") == metrics("resumed", "eval.jsonl")
    assert_equal(weights("whole"), weights("resumed"))


@pytest.mark.parametrize("clipping", ["joint", "token"])
def test_microbatches_do_not_matter(workplace, tiny_model, clipping):
    # Metrics that count prompts are weighted by tokens with token clipping: no response may end early.
    settings = {"clipping": clipping, "prompts_per_minibatch": 8, "updates": 2}
    train(config(tiny_model, "one", **settings))
    train(config(tiny_model, "eight", tokens_per_row=1, **settings))
    for one, eight in zip(metrics("one"), metrics("eight"), strict=True):
        assert one.keys() == eight.keys()
        for name in one.keys() - {"packing_efficiency"}:
            assert one[name] == pytest.approx(eight[name], rel=2e-3, abs=2e-4), name
    first, second = weights("one"), weights("eight")
    assert all(torch.allclose(first[name], second[name], atol=2e-4) for name in first)


@pytest.mark.parametrize("changes", [{"share_prompts": False}, {"tokens_per_row": 50}, {"offload": True}])
def test_the_packing_does_not_matter(workplace, tiny_model, changes):
    train(config(tiny_model, "plain", updates=3))
    train(config(tiny_model, "changed", updates=3, **changes))
    for plain, changed in zip(metrics("plain"), metrics("changed"), strict=True):
        for name in plain.keys() - {"packing_efficiency", "ratio/noise"}:
            assert plain[name] == pytest.approx(changed[name], rel=2e-3, abs=2e-4), name


def test_lora_trains_adapters_over_its_own_base_and_leaves_a_whole_model(workplace, tiny_model):
    settings = {"lora_rank": 4, "eval_prompts": "prompts.jsonl", "learning_rate": 1e-2, "save_every": 1}
    train(config(tiny_model, "run", updates=2, **settings))
    before, after = metrics("run", "eval.jsonl")
    assert before["kl"] == 0
    assert after["kl"] != 0
    start, end = weights_of_start(tiny_model), weights("run")
    moved = {name for name, weight in start.items() if not torch.equal(weight, end[name])}
    assert moved == {name for name in start if "proj" in name}
    # The base alone as the reference is what a second copy of the starting model would be.
    train(config(tiny_model, "second", updates=2, reference=tiny_model, **settings))
    assert metrics("run") == metrics("second")
    train(config(tiny_model, "run", updates=3, resume=True, **settings))
    train(config(tiny_model, "whole", updates=3, **settings))
    assert_equal(weights("run"), weights("whole"))


def test_frozen_layers_stay(workplace, tiny_model):
    train(config(tiny_model, "run", trainable_layers=1, updates=2))
    start, end = weights_of_start(tiny_model), weights("run")
    moved = {name for name, weight in start.items() if not torch.equal(weight, end[name])}
    assert moved == {name for name in start if "layers.1." in name or name == "model.norm.weight"}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weights_in_half_precision_train_and_resume_exactly(workplace, tiny_model, precision):
    train(config(tiny_model, "whole", precision=precision, save_every=2))
    copy_at_save_before("whole", "resumed")
    train(config(tiny_model, "resumed", precision=precision, resume=True))
    assert metrics("whole") == metrics("resumed")
    assert_equal(weights("whole"), weights("resumed"))
    if precision == "fp16":
        assert all(step["loss_scale"] >= 1 for step in metrics("whole"))


def test_rounding_is_logged_and_warned_of(workplace, tiny_model, capsys):
    train(config(tiny_model, "fp32", updates=1))
    train(config(tiny_model, "bf16", updates=2, precision="bf16", clip_range=1e-4))
    assert metrics("fp32")[0]["ratio/noise"] < 1e-4 < metrics("bf16")[0]["ratio/noise"]
    assert capsys.readouterr().out.count("rounding alone moves log-ratios") == 1


def test_sequences_beyond_the_reach_of_absolute_positions_are_refused(workplace, tokenizer, tmp_path):
    settings = {"vocab_size": len(tokenizer), "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**settings, eos_token_id=0, bos_token_id=0)).save_pretrained("gpt2")
    tokenizer.save_pretrained("gpt2")
    with pytest.raises(
        ValueError, match=r"up to 66 tokens together, and the positions of GPT2LMHeadModel .gpt2. end at 64"
    ):
        train(config("gpt2", "run", max_prompt_tokens=60))


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast", "bf16", "fp16"])
def test_the_first_ratio_is_exactly_one(workplace, tiny_model, precision):
    train(config(tiny_model, "run", precision=precision, updates=1, inner_epochs=1, prompts_per_minibatch=8))
    (step,) = metrics("run")
    assert step["ratio_mean"] == step["ratio_max"] == 1
    assert step["clip_fraction"] == 0


def test_gradient_checkpointing_changes_nothing(workplace, tiny_model):
    train(config(tiny_model, "plain", updates=2))
    train(config(tiny_model, "checkpointed", updates=2, gradient_checkpointing=True))
    first, second = weights("plain"), weights("checkpointed")
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


def test_a_nan_reward_stops_the_run_after_saving(workplace, tiny_model):
    broken = config(tiny_model, "run", reward="rewards_for_tests:nan_on_third_call")
    with pytest.raises(NotFiniteError, match=r"update 3: a reward is NaN or infinite \(16 values\)"):
        train(broken)
    AutoModelForCausalLM.from_pretrained("run/stopped-in-000003/model")
    # The function gives NaN once: the run goes on as if nothing had happened.
    train(replace(broken, resume=True))
    train(config(tiny_model, "whole"))
    assert_equal(weights("run"), weights("whole"))


def test_a_loss_that_is_not_finite_stops_the_run_after_saving(workplace, tiny_model):
    with pytest.raises(NotFiniteError, match=r"the loss or the gradient is NaN or infinite .*No state was"):
        train(config(tiny_model, "run", learning_rate=1e30))


def test_resuming_where_there_is_no_state_begins(workplace, tiny_model, capsys):
    train(config(tiny_model, "whole", updates=1))
    train(config(tiny_model, "run", updates=1, resume=True))
    assert "--resume: there is no state in run/state yet, the run begins" in capsys.readouterr().out
    assert_equal(weights("whole"), weights("run"))


@pytest.mark.parametrize("changes", [{}, {"reward_scaling": "absolute"}, {"precision": "fp16"}])
def test_a_stop_within_an_update_counts_its_rewards_once(workplace, tiny_model, changes):
    settings = {"reward": "rewards_for_tests:stops_on_third_call"} | changes
    with pytest.raises(SystemExit):
        train(config(tiny_model, "run", **settings))
    # The rewards of update 3 had entered the deviation that rewards are divided by.
    assert metrics("run")[-1]["step"] == 2
    train(config(tiny_model, "run", resume=True, **settings))
    train(config(tiny_model, "whole", **(settings | {"reward": "rewards_for_tests:vowels"})))
    assert metrics("run") == metrics("whole")
    assert_equal(weights("run"), weights("whole"))


def test_columns_travel_with_their_prompts(workplace, tiny_model):
    """The function asserts that they do; what it adds for the prompt cancels."""
    evaluated = {"eval_prompts": "answers.jsonl", "gold_reward": "rewards_for_tests:answered"}
    train(config(tiny_model, "answered", prompts="answers.jsonl", reward="rewards_for_tests:answered", updates=2))
    train(config(tiny_model, "varied", reward="rewards_for_tests:varied", updates=2, **evaluated))
    assert_equal(weights("answered"), weights("varied"))
    assert "gold" in metrics("varied", "eval.jsonl")[0]


def test_several_rewards_are_logged_and_their_sum_is_trained_on(workplace, tiny_model):
    twice = {"reward": "rewards_for_tests:varied,rewards_for_tests:vowels", "reward_weights": "2,0", "updates": 2}
    train(config(tiny_model, "two", **twice, eval_prompts="prompts.jsonl", length_penalty=0.5))
    train(config(tiny_model, "one", reward="rewards_for_tests:varied", updates=2, length_penalty=0.25))
    # Rewards are divided by their deviation.
    assert_equal(weights("two"), weights("one"))
    for step in metrics("two"):
        assert step["reward"] == pytest.approx(2 * step["reward/varied"] - step["penalty/length"])
        assert step["penalty/length"] == pytest.approx(step["response_length"] / 2)
    last = metrics("two", "eval.jsonl")[-1]
    assert last["reward"] == pytest.approx(2 * last["reward/varied"])
    assert last.keys() >= {"reward/vowels", "reward/vowels_std"}
    assert metrics("one")[0].keys() == metrics("two")[0].keys() - {
        "reward/varied",
        "reward/vowels",
    }


def vowels(responses: list[str]) -> list[float]:
    return [sum(c in "aeiou" for c in response) / 4 for response in responses]


def test_an_endpoint_that_fails_stops_the_run_after_saving(workplace, tiny_model, monkeypatch):
    """The first request is the check, and one follows in each update; what is asked twice is remembered."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    broken = True

    def reply(question: tuple[dict, int]) -> Reply:
        body, number = question
        if broken and number > 3:
            return Reply(500, b"out of memory")
        return Reply(body=json.dumps({"rewards": vowels(body["responses"])}).encode())

    with serving("/score", reply, lambda *question: question) as server:
        remote = config(tiny_model, "run", reward=server.url, reward_batch_size=64, reward_retries=0)
        with pytest.raises(EndpointError, match=r"update 3: .*/score answered with status 500.*step-000002: --resume"):
            train(remote)
        broken = False
        train(replace(remote, resume=True))
    train(config(tiny_model, "whole"))
    assert metrics("run") == metrics("whole")
    assert_equal(weights("run"), weights("whole"))


def test_a_reward_that_is_only_watched_may_be_no_number(workplace, tiny_model):
    rewards = "rewards_for_tests:vowels,rewards_for_tests:never_a_number"
    watched = config(tiny_model, "watched", reward=rewards, reward_weights="1,0", eval_prompts="prompts.jsonl")
    train(watched)
    train(replace(watched, output_dir="alone", reward="rewards_for_tests:vowels", reward_weights=""))
    assert_equal(weights("watched"), weights("alone"))
    assert {step["reward/never_a_number"] for step in metrics("watched")} == {None}


def test_rewards_whose_differences_overflow_stop_the_run(workplace, tiny_model):
    with pytest.raises(NotFiniteError, match="update 1: a difference or a sum of rewards is NaN or infinite"):
        train(config(tiny_model, "run", reward="rewards_for_tests:huge"))


def test_a_mended_reward_function_goes_on_and_other_prompts_do_not(workplace, tiny_model, capsys):
    train(config(tiny_model, "run", updates=1))
    source = Path("rewards_for_tests.py")
    source.write_text(source.read_text() + "\n# mended\n")
    train(config(tiny_model, "run", updates=2, resume=True))
    assert "resuming with another source of the reward function" in capsys.readouterr().out
    source = Path("prompts.jsonl")
    source.write_text(source.read_text().replace("tree", "trees"))
    with pytest.raises(ResumeError, match=r"--prompts \(prompts.jsonl\)"):
        train(config(tiny_model, "run", updates=3, resume=True))
