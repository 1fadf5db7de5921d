"""Small whole runs of every stage on the pretended device. They end, and what they report is finite."""

import gc
import json
import math
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from fastp3o.commands.online import OBJECTIVES
from fastp3o.generate.config import GenerateConfig
from fastp3o.generate.loop import generate
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.objectives.preferences import OFFLINE_OBJECTIVES
from fastp3o.run.names import EVALUATIONS
from fastp3o.run.signals import StoppedError
from fastp3o.training import preferences as preference
from fastp3o.training import reward_model
from fastp3o.training.loop import train
from tests.fastp3o.runs import assert_equal, config, metrics, weights
from tests.simulated_cuda.host import recorded

SMALL = {"updates": 2, "prompts_per_update": 4, "prompts_per_minibatch": 4, "inner_epochs": 2, "max_response_tokens": 4}
LENGTHS = {"max_prompt_tokens": 32, "max_response_tokens": 16}


def assert_finite(folder: str, steps: int, name: str = "metrics.jsonl") -> None:
    lines = metrics(folder, name)
    assert len(lines) == steps
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))


def online(model: str, folder: str, config_class=P3OConfig, **changes) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    settings = SMALL | {"sampler": "transformers", "precision": "bf16"} | changes
    train(config(model, folder, config_class, **settings))


def supervised(train_data: str, model: str, folder: str, **changes) -> dict:
    settings = {"train_data": train_data, "batch_size": 4, "report_to": "none", "precision": "bf16"}
    return settings | LENGTHS | {"model": model, "output_dir": folder} | changes


# The mixture of two policies is sampled by the engine, which takes the interpreter long.
ENGINE = {"sampler": "engine", "limit": 2, "prompts_per_update": 2, "prompts_per_minibatch": 2}
NEEDS = {"ppg": {"inner_epochs": 1}, "nash_md": ENGINE}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_online_objectives(tiny_model, workplace, name):
    online(tiny_model, "run", OBJECTIVES[name], **NEEDS.get(name, {}))
    assert_finite("run", 2)


def test_p3o_with_all_that_saves_memory(tiny_model, workplace):
    """Steps are captured; the second update samples from weights that have moved, and captures nothing anew."""
    saves = {"lora_rank": 4, "offload": True, "gradient_checkpointing": True, "reward": reward_of(tiny_model)}
    evaluated = {"eval_prompts": "prompts.jsonl", "eval_every": 1, "eval_limit": 2}
    online(tiny_model, "run", **ENGINE, **saves, **evaluated)
    assert_finite("run", 2)
    assert_finite("run", 3, EVALUATIONS)


def reward_of(tiny_model: str) -> str:
    """A reward model's folder."""
    given = supervised("preferences.jsonl", tiny_model, "rm", eval_data="preferences.jsonl")
    reward_model.train(reward_model.RewardModelConfig(**given))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert_finite("rm", 2)
    return "rm/model"


@pytest.mark.parametrize("current", [0, 1])
def test_the_second_device(tiny_model, workplace, monkeypatch, current):
    """Chosen by its number while the first one is current, or current as in a process with LOCAL_RANK=1."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    torch.cuda.set_device(current)
    if current == 0:
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:1")
    gc.collect()
    torch.cuda.reset_peak_memory_stats(0)
    others = torch.cuda.memory_allocated(0)
    with recorded() as record:
        online(tiny_model, "run", offload=True, precision="fp16", **ENGINE)
    assert_finite("run", 2)
    assert record.launches["graph"]
    assert record.devices.keys() == {"cuda:1"}
    assert torch.cuda.max_memory_allocated(0) == others
    assert torch.cuda.current_device() == 1
    lines = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    assert all(line["peak_memory_gib"] > 0 for line in lines)


def test_a_resumed_run_is_the_unbroken_one(tiny_model, workplace):
    settings = {"precision": "fp16", "updates": 4}
    online(tiny_model, "whole", **settings)
    stopping = settings | {"reward": "rewards_for_tests:stops_on_third_call"}
    with pytest.raises(StoppedError):
        online(tiny_model, "stopped", **stopping)
    online(tiny_model, "stopped", resume=True, **stopping)
    assert_equal(weights("whole"), weights("stopped"))


@pytest.mark.parametrize("name", OFFLINE_OBJECTIVES)
def test_offline_objectives(tiny_model, workplace, name):
    data = "unpaired.jsonl" if name == "kto" else "preferences.jsonl"
    preference.train(OFFLINE_OBJECTIVES[name](**supervised(data, tiny_model, "run")))
    assert_finite("run", len(metrics("run")))


def test_generate(tiny_model, workplace):
    lengths = LENGTHS | {"max_response_tokens": 4, "keep_unfinished": True, "limit": 2, "responses_per_prompt": 2}
    given = {"prompts": "prompts.jsonl", "reward": "rewards_for_tests:varied"}
    generate(GenerateConfig(model=tiny_model, output_dir="samples", **given, **lengths))
    assert len(Path("samples/kept.jsonl").read_text().splitlines()) == 2
