"""Rollouts of runs: at a temperature, truncated, sampled some rounds before they train, and in the
log.
"""

import json
from pathlib import Path
from statistics import fmean as mean

import pytest
from transformers import AutoModelForCausalLM

from fastp3o.errors import UserError
from fastp3o.objectives.config.policy_gradient import GRPOConfig
from fastp3o.objectives.config.preferences import NashMDConfig
from fastp3o.training.loop import train
from tests.fastp3o.models.model_families import logprobs_alone
from tests.fastp3o.rollouts.vllm.stand_in import StandIn
from tests.fastp3o.runs import config, metrics

EVALUATED = {"eval_prompts": "prompts.jsonl", "eval_limit": 4}
ONE_STEP = {"updates": 1, "inner_epochs": 1, "prompts_per_minibatch": 8}


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2}, {"offload": True}], ids=str)
def test_a_tempered_run_begins_with_ratios_of_one_and_no_gap(workplace, tiny_model, changes):
    train(config(tiny_model, "run", temperature=0.6, **ONE_STEP, **EVALUATED, **changes))
    (step,) = metrics("run")
    assert step["sampler_gap"] < 1e-4
    assert step["ratio_mean"] == 1.0
    # Policy and reference are tempered alike.
    assert abs(metrics("run", "eval.jsonl")[0]["kl"]) < 1e-6
    assert abs(step["kl"]) < 1e-6
    saved = json.loads(Path("run/model/generation_config.json").read_text())
    assert (saved["do_sample"], saved["temperature"], saved["top_k"], saved["top_p"]) == (
        True,
        0.6,
        0,
        1.0,
    )


def test_a_server_samples_from_the_tempered_policy(workplace, tiny_model):
    """And one whose log-probs are before temperature and truncation is refused."""
    for changes in ({"temperature": 0.6}, {"min_p": 0.2}):
        with (
            StandIn(tiny_model) as raw,
            pytest.raises(UserError, match="--logprobs-mode processed_logprobs"),
        ):
            train(config(tiny_model, "refused", sampler="vllm", vllm_url=raw.url, **changes))
    with StandIn(tiny_model, processed=True) as server:
        served = {"sampler": "vllm", "vllm_url": server.url, "temperature": 0.6, "updates": 2}
        train(config(tiny_model, "run", **served))
        assert all(step["sampler_gap"] < 1e-4 for step in metrics("run"))
        train(config(tiny_model, "cut", **served, top_k=4))
        assert metrics("cut")[0]["sampler_gap"] > 0.1
    temperatures = {
        body["temperature"] for _, body in server.requests if body.get("max_tokens") == 6
    }
    assert temperatures == {0.6}


@pytest.mark.parametrize(
    "changes", [{"old_logprobs": "sampler"}, {"sampler_ratio_cap": 2.0}, {}], ids=str
)
def test_ratios_of_truncated_rollouts(workplace, tiny_model, changes):
    """To what sampled they are the share of the distribution that was kept, at the first step; to
    the policy 1.
    """
    train(
        config(
            tiny_model, "run", GRPOConfig, top_p=0.5, responses_per_prompt=4, **ONE_STEP, **changes
        )
    )
    (step,) = metrics("run")
    assert step["sampler_gap"] > step["sampler_kl"] > 0.5
    # between evaluations of the policy, whatever the ratios are to
    assert step["ratio/noise"] < 1e-4
    ratio = step["sampler_ratio_mean" if "sampler_ratio_cap" in changes else "ratio_mean"]
    if changes:
        assert 0.5 <= ratio < 0.6  # the last token kept goes beyond half, by its own probability
    else:
        assert ratio == 1.0
    assert "top_p" in Path("run/model/generation_config.json").read_text()


def test_a_round_is_sampled_from_the_policy_of_so_many_updates_before(workplace, tiny_model):
    train(config(tiny_model, "fresh", updates=5))
    train(config(tiny_model, "stale", updates=5, rounds_ahead=2))
    fresh, stale = metrics("fresh"), metrics("stale")
    assert [step["staleness"] for step in stale] == [0, 1, 2, 2, 2]
    # The first round is the same one, and the next two are sampled by the same policy with their
    # own seeds.
    names = ("reward", "response_length", "loss")
    assert [stale[0][name] for name in names] == [fresh[0][name] for name in names]
    assert (
        stale[1]["response_length"] != fresh[1]["response_length"]
        or stale[1]["kl"] != fresh[1]["kl"]
    )
    assert stale[0]["sampler_gap"] < 1e-4
    assert all(step["sampler_gap"] > 1e-3 for step in stale[1:])
    assert {"sampler_kl"} == {name for name in stale[1] if name.startswith("sampler_k")}


def logged(folder: str) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "rollouts.jsonl").open()]


def test_all_of_an_update_adds_up_to_its_metrics_and_log_ratios_are_the_models_own(
    workplace, tiny_model, tokenizer
):
    """Text is that of its tokens."""
    rewards = {
        "reward": "rewards_for_tests:varied,rewards_for_tests:vowels",
        "reward_weights": "2,1",
        "save_every": 1,
    }
    train(
        config(
            tiny_model,
            "run",
            **rewards,
            length_penalty=0.5,
            responses_per_prompt=3,
            log_rollouts_prompts=0,
        )
    )
    steps, start = metrics("run"), AutoModelForCausalLM.from_pretrained(tiny_model)
    assert steps[-1]["kl"] != 0
    for step in steps:
        groups = [group for group in logged("run") if group["step"] == step["step"]]
        responses = [response for group in groups for response in group["responses"]]
        assert (len(groups), len(responses)) == (8, 24)
        assert mean([one["reward"] for one in responses]) == pytest.approx(step["reward"])
        assert mean([one["log_ratio"] for one in responses]) == pytest.approx(step["kl"], abs=1e-6)
        assert mean([group["kl"] for group in groups]) == pytest.approx(step["kl"], abs=1e-6)
        assert mean([len(one["ids"]) for one in responses]) == pytest.approx(
            step["response_length"]
        )
        assert 1 - mean([one["finished"] for one in responses]) == pytest.approx(
            step["missing_eos"]
        )
        assert responses[0]["parts"].keys() == {"reward/varied", "reward/vowels", "penalty/length"}
        for one in responses:
            part = one["parts"]
            expected = 2 * part["reward/varied"] + part["reward/vowels"] - part["penalty/length"]
            assert one["reward"] == pytest.approx(expected)
    policy = AutoModelForCausalLM.from_pretrained("run/checkpoint-000003")
    for prompt, one in ((group["prompt"], one) for group in groups for one in group["responses"]):
        assert tokenizer.decode(one["ids"], skip_special_tokens=True) == one["text"]
        before, now = (
            logprobs_alone(model, tokenizer(prompt).input_ids, one["ids"])
            for model in (start, policy)
        )
        assert one["log_ratio"] == pytest.approx((now - before).sum().item(), abs=1e-4)


def test_the_kl_is_over_the_policys_own_responses(workplace, tiny_model):
    train(config(tiny_model, "run", NashMDConfig, mixture=0.5, updates=2))
    for group in logged("run"):
        own = group["responses"][
            : 2 - config(tiny_model, "run", NashMDConfig, mixture=0.5).from_mixture
        ]
        assert group["kl"] == pytest.approx(mean([one["log_ratio"] for one in own]))


def test_updates_and_prompts_are_chosen_by_flags(workplace, tiny_model):
    train(config(tiny_model, "some", log_rollouts=2, log_rollouts_prompts=3))
    assert [group["step"] for group in logged("some")] == [2, 2, 2, 4, 4, 4]
    # The data have eight prompts, and each update trains on all: the same ones are logged.
    assert {group["prompt"] for group in logged("some")[:3]} == {
        group["prompt"] for group in logged("some")[3:]
    }
    train(config(tiny_model, "none", log_rollouts=0))
    assert not [*Path("none").glob("rollouts*")]
