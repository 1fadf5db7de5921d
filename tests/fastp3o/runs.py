"""Short runs on the tiny model, and what they leave."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file

from fastp3o import train
from fastp3o.config import StageConfig
from fastp3o.objectives.config.base import OnlineConfig
from fastp3o.objectives.config.p3o import P3OConfig

Config = TypeVar("Config", bound=OnlineConfig)

TIMES = ("seconds", "tokens_per_second", "peak_memory")


def config(
    tiny_model: str, output_dir: str, config_class: type[Config] = P3OConfig, **changes
) -> Config:
    settings = {"model": tiny_model, "output_dir": output_dir, "prompts": "prompts.jsonl"}
    settings |= {
        "updates": 4,
        "prompts_per_update": 8,
        "prompts_per_minibatch": 4,
        "responses_per_prompt": 2,
    }
    settings |= {
        "inner_epochs": 2,
        "max_response_tokens": 6,
        "precision": "fp32",
    }
    if "learning_rate" not in config_class.further_needs:  # TRPO has none
        settings["learning_rate"] = 3e-3
    # With this seed, among the first responses are some with a reward, and none that ends early.
    settings |= {
        "reward": "rewards_for_tests:vowels",
        "report_to": "none",
        "samples_every": 0,
        "seed": 3,
    }
    return config_class(**(settings | changes))


def metrics(folder: str, name: str = "metrics.jsonl") -> list[dict]:
    lines = [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


def weights(folder: str) -> dict[str, torch.Tensor]:
    """As they are in the file of the finished model, which transformers would take ten times as
    long to load.
    """
    return load_file(Path(folder) / "model" / "model.safetensors")


def copy_at_save_before(folder: str, copy: str) -> None:
    """Copies a finished run as it would be if it had been killed before its last save."""
    shutil.copytree(folder, copy)
    (_, last) = sorted((Path(copy) / "state").iterdir())
    shutil.rmtree(last)
    shutil.rmtree(Path(copy) / "model")


def assert_resumes(config: StageConfig) -> None:
    """The finished run of a configuration ends with the same bits if it goes on from the state
    before its last.
    """
    folder, resumed = config.output_dir, f"{config.output_dir}-resumed"
    copy_at_save_before(folder, resumed)
    train(replace(config, output_dir=resumed, resume=True))
    assert metrics(folder) == metrics(resumed)
    assert_equal(weights(folder), weights(resumed))


def assert_equal(first: dict, second: dict) -> None:
    assert all(torch.equal(first[name], second[name]) for name in first)


def weights_of_start(tiny_model: str) -> dict[str, torch.Tensor]:
    return load_file(Path(tiny_model) / "model.safetensors")


def records(name: str) -> list[dict]:
    """Of a data file of `workplace`."""
    return [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]


def vowels(prompts: list[str], responses: list[str]) -> list[float]:
    """As `rewards_for_tests:vowels`."""
    return [sum(c in "aeiou" for c in response) / 4 for response in responses]
