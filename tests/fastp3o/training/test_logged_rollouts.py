import gzip
import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastp3o.objectives.preferences import NashMDConfig
from fastp3o.training.loop import train
from fastp3o.training.metrics import chosen_prompts
from tests.fastp3o.runs import config, metrics


def logged(folder: str) -> list[dict]:
    return [json.loads(line) for line in gzip.open(Path(folder, "rollouts.jsonl.gz"))]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_all_of_an_update_adds_up_to_its_metrics(workplace, tiny_model):
    rewards = {"reward": "rewards_for_tests:varied,rewards_for_tests:vowels", "reward_weights": "2,1"}
    train(config(tiny_model, "run", **rewards, length_penalty=0.5, responses_per_prompt=3, log_rollouts_prompts=0))
    steps = metrics("run")
    assert steps[-1]["kl"] != 0
    for step in steps:
        groups = [group for group in logged("run") if group["step"] == step["step"]]
        responses = [response for group in groups for response in group["responses"]]
        assert (len(groups), len(responses)) == (8, 24)
        assert mean([one["reward"] for one in responses]) == pytest.approx(step["reward"])
        assert mean([one["log_ratio"] for one in responses]) == pytest.approx(step["kl"], abs=1e-6)
        assert mean([group["kl"] for group in groups]) == pytest.approx(step["kl"], abs=1e-6)
        assert mean([len(one["ids"]) for one in responses]) == pytest.approx(step["response_length"])
        assert 1 - mean([one["finished"] for one in responses]) == pytest.approx(step["missing_eos"])
        assert responses[0]["parts"].keys() == {"reward/varied", "reward/vowels", "penalty/length"}
        for one in responses:
            part = one["parts"]
            expected = 2 * part["reward/varied"] + part["reward/vowels"] - part["penalty/length"]
            assert one["reward"] == pytest.approx(expected)


def test_text_is_that_of_its_tokens_and_log_ratios_are_the_models_own(workplace, tiny_model, tokenizer):
    train(config(tiny_model, "run", updates=2, save_every=1))
    start, policy = map(AutoModelForCausalLM.from_pretrained, (tiny_model, "run/checkpoint-000001"))
    for group in logged("run")[-8:]:
        prompt = tokenizer(group["prompt"])["input_ids"]
        for one in group["responses"]:
            ids = torch.tensor([prompt + one["ids"]])
            assert tokenizer.decode(one["ids"], skip_special_tokens=True) == one["text"]
            with torch.no_grad():
                sums = [
                    model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])
                    for model in (policy, start)
                ]
            assert one["log_ratio"] == pytest.approx((sums[0] - sums[1]).sum().item(), abs=1e-4)


def test_the_kl_is_over_the_policys_own_responses(workplace, tiny_model):
    train(config(tiny_model, "run", NashMDConfig, mixture=0.5, updates=2))
    for group in logged("run"):
        own = group["responses"][: 2 - config(tiny_model, "run", NashMDConfig, mixture=0.5).from_mixture]
        assert group["kl"] == pytest.approx(mean([one["log_ratio"] for one in own]))


def test_updates_and_prompts_are_chosen_by_flags(workplace, tiny_model):
    train(config(tiny_model, "some", log_rollouts=2, log_rollouts_prompts=3))
    assert [group["step"] for group in logged("some")] == [2, 2, 2, 4, 4, 4]
    # The data have eight prompts, and each update trains on all: the same ones are logged.
    assert {group["prompt"] for group in logged("some")[:3]} == {group["prompt"] for group in logged("some")[3:]}
    train(config(tiny_model, "none", log_rollouts=0))
    assert not [*Path("none").glob("rollouts*")]


def test_the_prompts_that_are_logged_are_those_of_the_lowest_hashes():
    """They come again in the next epoch."""
    texts = [f"prompt {number}" for number in range(64)]
    first = chosen_prompts(texts, 5)
    assert first == sorted(first)
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    assert sorted(digests[place] for place in first) == sorted(digests)[:5]
    assert chosen_prompts(texts, 0) == list(range(64))
