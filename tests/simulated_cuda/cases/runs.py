"""Small whole runs of the online stages on the pretended device. They end, and what they report is
finite.
"""

import gc
import json
import math
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.run.names import EVALUATIONS
from fastp3o.training import reward_model
from fastp3o.training.loop import train
from tests.fastp3o.runs import config, metrics
from tests.simulated_cuda.host import recorded

SMALL = {
    "updates": 2,
    "prompts_per_update": 4,
    "prompts_per_minibatch": 4,
    "inner_epochs": 2,
    "max_response_tokens": 4,
}


def assert_finite(folder: str, steps: int, name: str = "metrics.jsonl") -> None:
    lines = metrics(folder, name)
    assert len(lines) == steps
    assert all(
        math.isfinite(value)
        for line in lines
        for value in line.values()
        if isinstance(value, float)
    )


def online(model: str, folder: str, config_class=P3OConfig, **changes) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    settings = (
        SMALL | {"sampler": "transformers", "old_logprobs": "policy", "precision": "bf16"} | changes
    )
    train(config(model, folder, config_class, **settings))


# The mixture of two policies is sampled by the engine, which takes the interpreter long.
ENGINE = {"sampler": "engine", "limit": 2, "prompts_per_update": 2, "prompts_per_minibatch": 2}
NEEDS = {"ppg": {"inner_epochs": 1}, "nash_md": ENGINE, "trpo": {"precision": "fp32"}}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_online_objectives(tiny_model, workplace, name):
    online(tiny_model, "run", OBJECTIVES[name], deterministic=True, **NEEDS.get(name, {}))
    assert_finite("run", 2)


def test_p3o_with_all_that_saves_memory(tiny_model, workplace):
    """Steps are captured; the second update samples from weights that have moved, and captures
    nothing anew.
    """
    given = {
        "train_data": "preferences.jsonl",
        "eval_data": "preferences.jsonl",
        "batch_size": 4,
        "report_to": "none",
    }
    given |= {"precision": "bf16", "max_prompt_tokens": 32, "max_response_tokens": 16}
    reward_model.train(reward_model.RewardModelConfig(model=tiny_model, output_dir="rm", **given))
    assert_finite("rm", 2)
    saves = {"lora_rank": 4, "offload": True, "gradient_checkpointing": True, "reward": "rm/model"}
    evaluated = {"eval_prompts": "prompts.jsonl", "eval_every": 1, "eval_limit": 2}
    online(tiny_model, "run", **ENGINE, **saves, **evaluated)
    assert_finite("run", 2)
    assert_finite("run", 3, EVALUATIONS)


@pytest.mark.parametrize("current", [0, 1])
def test_the_second_device(tiny_model, workplace, monkeypatch, current):
    """Chosen by its number while the first one is current, or current as in a process with
    LOCAL_RANK=1.
    """
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
