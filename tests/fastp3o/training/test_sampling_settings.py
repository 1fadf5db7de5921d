"""Training with a temperature, which makes the policy another, and with truncation, which samples from a part of it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from fastp3o.errors import UserError
from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import labelled_logprobs, untempered
from fastp3o.objectives.policy_gradient import GRPOConfig
from fastp3o.objectives.preferences import DPOConfig
from fastp3o.packing.pack import Packing, by_group, pack
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.groups import POLICY_ITSELF, SamplingSettings, token_ids
from fastp3o.training.loop import train
from fastp3o.training.preferences import train as train_preference
from fastp3o_kernels import sequence_logprobs
from tests.fastp3o.groups import tokenised
from tests.fastp3o.rollouts.vllm.stand_in import standing_in
from tests.fastp3o.runs import config, metrics, weights

EVALUATED = {"eval_prompts": "prompts.jsonl", "eval_limit": 4}
ONE_STEP = {"updates": 1, "inner_epochs": 1, "prompts_per_minibatch": 8}
VALUES = ("loss", "kl", "reward", "entropy", "ratio_mean", "response_length")


def policys_own(policy, groups):
    """log π(y|x) of the groups' responses, [P, K]."""
    rows = pack(*token_ids(groups), Packing(10_000))
    with torch.no_grad():
        return by_group(rows, [sequence_logprobs(labelled_logprobs(policy, row), row.cu_seqlens) for row in rows])


def drawn(policy, tokenizer, settings=POLICY_ITSELF):
    """Groups from the engine, and its log π(y|x), [P, K]."""
    sampler = EngineSampler(policy, tokenizer, max_response_tokens=9, batch_size=4, settings=settings)
    groups = sampler(tokenised(tokenizer, ["a", "longer"]), 2, 0)
    return groups, torch.tensor([[response.logprob for response in group.responses] for group in groups])


@pytest.mark.parametrize("temperature", [0.4, 1.7])
def test_the_engines_log_probs_are_the_tempered_policys(tiny_model, tokenizer, temperature):
    policy = load_policy(tiny_model)
    policy.temperature = temperature
    groups, sampled = drawn(policy, tokenizer)
    torch.testing.assert_close(sampled, policys_own(policy, groups), atol=1e-4, rtol=0)
    with untempered(policy):
        assert not torch.allclose(sampled, policys_own(policy, groups), atol=0.1)


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
    assert (saved["do_sample"], saved["temperature"], saved["top_k"], saved["top_p"]) == (True, 0.6, 0, 1.0)


def test_a_tempered_run_is_that_of_a_model_with_a_divided_head(workplace, tiny_model, tokenizer):
    """Of a model whose head does not train: AdamW's steps do not scale with gradients, so a divided one would move as
    far as a whole one.
    """
    temperature = 0.8
    for folder, divisor in (("whole", 1.0), ("divided", temperature)):
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() / divisor)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for folder, changes in (("whole", {"temperature": temperature}), ("divided", {})):
        train(config(folder, f"{folder}-run", trainable_layers=1, updates=2, **EVALUATED, **changes))
    for whole, divided in zip(metrics("whole-run"), metrics("divided-run"), strict=True):
        assert {name: whole[name] for name in VALUES} == pytest.approx({n: divided[n] for n in VALUES}, abs=1e-5)
    tempered, expected = weights("whole-run"), weights("divided-run")
    tempered["lm_head.weight"] = tempered["lm_head.weight"] / temperature
    start = AutoModelForCausalLM.from_pretrained("divided").state_dict()
    assert max((expected[name] - start[name]).abs().max() for name in start) > 1e-3
    for name, weight in expected.items():
        torch.testing.assert_close(tempered[name], weight, atol=1e-4, rtol=1e-4)


def test_a_server_samples_from_the_tempered_policy(workplace, tiny_model):
    """And one whose log-probs are before temperature and truncation is refused."""
    for changes in ({"temperature": 0.6}, {"min_p": 0.2}):
        with standing_in(tiny_model) as raw, pytest.raises(UserError, match="--logprobs-mode processed_logprobs"):
            train(config(tiny_model, "refused", sampler="vllm", vllm_url=raw.url, **changes))
    with standing_in(tiny_model, processed=True) as server:
        served = {"sampler": "vllm", "vllm_url": server.url, "temperature": 0.6, "updates": 2}
        train(config(tiny_model, "run", **served))
        assert all(step["sampler_gap"] < 1e-4 for step in metrics("run"))
        train(config(tiny_model, "cut", **served, top_k=4))
        assert metrics("cut")[0]["sampler_gap"] > 0.1
    temperatures = {body["temperature"] for _, body in server.requests if body.get("max_tokens") == 6}
    assert temperatures == {0.6}


def test_truncation_is_in_the_samplers_log_probs_alone(tiny_model, tokenizer):
    policy = load_policy(tiny_model)
    groups, sampled = drawn(policy, tokenizer, SamplingSettings(top_k=5))
    assert (sampled > policys_own(policy, groups) + 1).all()


@pytest.mark.parametrize("changes", [{"old_logprobs": "sampler"}, {"sampler_ratio_cap": 2.0}, {}], ids=str)
def test_ratios_of_truncated_rollouts(workplace, tiny_model, changes):
    """To what sampled they are the share of the distribution that was kept, at the first step; to the policy 1."""
    train(config(tiny_model, "run", GRPOConfig, top_p=0.5, responses_per_prompt=4, **ONE_STEP, **changes))
    (step,) = metrics("run")
    assert step["sampler_gap"] > step["sampler_kl"] > 0.5
    ratio = step["sampler_ratio_mean" if "sampler_ratio_cap" in changes else "ratio_mean"]
    if changes:
        assert 0.5 <= ratio < 0.6  # the last token kept goes beyond half, by its own probability
    else:
        assert ratio == 1.0
    assert "top_p" in Path("run/model/generation_config.json").read_text()


def test_preferences_train_the_tempered_policy(workplace, tiny_model):
    """Policy and reference, the log-probs that are kept, and evaluations."""
    given = {
        "model": tiny_model,
        "train_data": "preferences.jsonl",
        "report_to": "none",
        "max_response_tokens": 8,
        "eval_prompts": "prompts.jsonl",
        "reference_logprobs": "kept",
    }
    for temperature in (1.0, 0.5):
        train_preference(DPOConfig(output_dir=f"at-{temperature}", temperature=temperature, **given))
    assert len(list(Path("kept").iterdir())) == 2
    first, cold = (metrics(f"at-{t}")[0] for t in (1.0, 0.5))
    assert first["loss"] == pytest.approx(cold["loss"], abs=1e-4)
    assert abs(metrics("at-0.5", "eval.jsonl")[0]["kl"]) < 1e-5
    assert GenerationConfig.from_pretrained("at-0.5/model").temperature == 0.5
