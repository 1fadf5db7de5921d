"""Whole runs with dropout of adapters: the seed decides, a resumed run goes on, evaluations have none."""

import pytest
import torch

from fastp3o.errors import UserError
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.objectives.preferences import NashMDConfig, OnlineDPOConfig
from fastp3o.training import sft
from fastp3o.training.config import SFTConfig
from fastp3o.training.loop import train
from tests.fastp3o.runs import assert_equal, config, copy_at_save_before, metrics, weights

SUPERVISED = {"batch_size": 4, "epochs": 2, "max_response_tokens": 20, "report_to": "none", "precision": "fp32"}
SUPERVISED |= {"learning_rate": 1e-2, "lora_rank": 2, "lora_dropout": 0.5}


def fine_tune(model: str, folder: str, **changes) -> None:
    sft.train(SFTConfig(**(SUPERVISED | {"model": model, "output_dir": folder, "train_data": "sft.jsonl"} | changes)))


def different(first: str, second: str) -> bool:
    return any(not torch.equal(weight, weights(second)[name]) for name, weight in weights(first).items())


def test_the_seed_decides_and_a_resumed_run_goes_on(workplace, tiny_model):
    settings = {"save_every": 3, "eval_data": "sft.jsonl", "gradient_checkpointing": True}
    fine_tune(tiny_model, "whole", **settings)
    copy_at_save_before("whole", "resumed")
    fine_tune(tiny_model, "resumed", resume=True, **settings)
    assert metrics("resumed") == metrics("whole")
    assert_equal(weights("resumed"), weights("whole"))
    fine_tune(tiny_model, "none", lora_dropout=0.0, **settings)
    assert different("none", "whole")
    # An evaluation at the end is that of the saved model.
    fine_tune("whole/model", "again", lora_rank=0, lora_dropout=0.0, **settings)
    end, begin = metrics("whole", "eval.jsonl")[-1], metrics("again", "eval.jsonl")[0]
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
