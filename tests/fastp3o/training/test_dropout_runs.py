"""Whole runs with dropout of adapters: steps have it, evaluations and rollouts have none."""

import pytest
import torch

from fastp3o.errors import UserError
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.objectives.preferences import NashMDConfig, OnlineDPOConfig
from fastp3o.training import sft
from fastp3o.training.loop import train
from tests.fastp3o.runs import config, metrics, weights
from tests.fastp3o.training.test_supervised import sft_config


def different(first: str, second: str) -> bool:
    return any(not torch.equal(weight, weights(second)[name]) for name, weight in weights(first).items())


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
    assert all(first[name] == plain[name] for name in ("reward", "kl", "entropy", "sampler_gap", "response_length"))
