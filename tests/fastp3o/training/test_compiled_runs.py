"""Whole runs with `--compile_layers`, against the same without."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from fastp3o.training.loop import train
from tests.fastp3o.runs import assert_equal, config, metrics, weights

pytestmark = pytest.mark.compiled


@pytest.fixture(autouse=True)
def counted():
    torch.compiler.reset()
    counters.clear()


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens_per_row": 60, "eval_prompts": "prompts.jsonl"},
        {"lora_rank": 2, "gradient_checkpointing": True, "offload": True, "eval_prompts": "prompts.jsonl"},
        {"trainable_layers": 1, "share_prompts": False},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_a_run_equals_one_with_plain_layers(workplace, tiny_model, changes):
    settings = {"updates": 2, "learning_rate": 3e-4, "reward": "rewards_for_tests:varied"} | changes
    train(config(tiny_model, "plain", **settings))
    train(config(tiny_model, "compiled", compile_layers=True, **settings))
    torch.testing.assert_close(weights("compiled"), weights("plain"), atol=1e-5, rtol=0.0)
    for one, two in zip(metrics("plain"), metrics("compiled"), strict=True):
        assert two | {"ratio/noise": 0} == pytest.approx(one | {"ratio/noise": 0}, abs=1e-4)
    assert counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast", "bf16", "fp16"])
def test_the_first_ratio_is_exactly_one(workplace, tiny_model, precision):
    settings = {"precision": precision, "updates": 1, "inner_epochs": 1, "prompts_per_minibatch": 8}
    train(config(tiny_model, "run", compile_layers=True, **settings))
    (step,) = metrics("run")
    assert step["ratio_mean"] == step["ratio_max"] == 1
    assert step["clip_fraction"] == 0


def test_a_resumed_run_has_the_bits_of_a_whole_one(workplace, tiny_model):
    begun = config(tiny_model, "run", compile_layers=True, updates=2)
    train(begun)
    train(replace(begun, updates=4, resume=True))
    train(config(tiny_model, "whole", compile_layers=True, updates=4))
    assert_equal(weights("run"), weights("whole"))
