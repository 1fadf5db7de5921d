"""The page of options by model and GPU: the first way of training that `fastp3o memory` counts as
fitting.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.markdown import markdown
from benchmarks.pages.sources import Records
from fastp3o.commands.memory import CONTEXT, MemoryConfig, phases_of
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.trainable import choose_trainable
from fastp3o.packing.settings import Packing
from fastp3o.training.predicted_memory import Lengths, Model

SHAPES = "model_shapes.json"
NONE_FITS = "–"

# Mean lengths, which are the data's and no options of training.
MEANS = {"prompt_tokens": 200, "response_tokens": 300}
COMMON: dict[str, Any] = {"responses_per_prompt": 4, "max_response_tokens": 512}
CHECKPOINTED: dict[str, Any] = {"gradient_checkpointing": True}
SMALL: dict[str, Any] = {"tokens_per_row": 4096, "rollout_batch_size": 4}
# From what needs most to what needs least.
WAYS: dict[str, dict[str, Any]] = {
    "all": {"rollout_batch_size": 16},
    "all, checkpointed": {"rollout_batch_size": 16} | CHECKPOINTED,
    "all, offloaded": {"rollout_batch_size": 16, "offload": True} | CHECKPOINTED,
    "all, 8-bit": {"offload": True, "optimizer": "adamw_8bit"} | CHECKPOINTED | SMALL,
    "LoRA": {"rollout_batch_size": 16, "lora_rank": 16} | CHECKPOINTED,
    "LoRA, small": {"lora_rank": 16} | CHECKPOINTED | SMALL,
}
IN_ONE_PROCESS = "all, 8-bit"  # bitsandbytes takes no shards


class Machine(NamedTuple):
    """GB of each GPU, and how many train together."""

    gb: int
    gpus: int = 1


MACHINES = {
    "24 GB (RTX 4090)": Machine(24),
    "40 GB (A100)": Machine(40),
    "80 GB (H100, A100)": Machine(80),
    "141 GB (H200)": Machine(141),
    "8 × 80 GB": Machine(80, gpus=8),
}


def options(model: str, way: str, machine: Machine) -> MemoryConfig:
    """The options of `fastp3o memory` for this way of training. Gemma 3 overflows in fp16, so that
    training with `--precision auto` takes bf16-autocast.
    """
    precision = {"precision": "bf16-autocast"} if "gemma-3" in model else {}
    given = (
        COMMON | MEANS | WAYS[way] | precision | {"gpu_gb": float(machine.gb), "gpus": machine.gpus}
    )
    return MemoryConfig(model=model, **given)


@cache
def sizes(config: tuple[tuple[str, Any], ...], lora_rank: int) -> Model:
    """A model of these sizes, of which no tensor is made."""
    trains = MemoryConfig(model="", lora_rank=lora_rank)
    with torch.device("meta"):
        policy = PackedModel(AutoModelForCausalLM.from_config(AutoConfig.for_model(**dict(config))))
        choose_trainable(policy, trains)
    return Model(policy)


def needed(shape: dict[str, Any], config: MemoryConfig) -> float:
    """GB of the phase that takes most, CUDA's own included: what `fastp3o memory` says beside "at
    most".
    """
    lengths = Lengths.full_row(
        Packing(config.tokens_per_row, config.share_prompts),
        prompt=config.prompt_tokens,
        response=config.response_tokens,
        responses_per_prompt=config.responses_per_prompt,
    )
    phases = phases_of(config, sizes(tuple(shape.items()), config.lora_rank), lengths)
    return max(memory.peak for memory in phases.values()) / 1e9 + CONTEXT


def ways(machine: Machine) -> Iterator[str]:
    return (way for way in WAYS if machine.gpus == 1 or way != IN_ONE_PROCESS)


def fitting(name: str, shape: dict[str, Any], machine: Machine) -> tuple[str, float] | None:
    """The first way that fits, and its GB on each GPU."""
    for way in ways(machine):
        gb = needed(shape, options(name, way, machine))
        if gb <= machine.gb:
            return way, gb
    return None


def flags(given: dict[str, Any]) -> str:
    """Options as they are typed: those that differ from training's defaults."""
    return " ".join(
        f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items()
    )


def typed(_: Records) -> str:
    """What is typed for each way."""
    return markdown(
        [["way", "options"], *([way, f"`{flags(COMMON | given)}`"] for way, given in WAYS.items())]
    )


def gallery(records: Records) -> str:
    """A row for each model: on each machine the way that fits, and the GB that it takes."""
    lines = [["model", *MACHINES]]
    for name, model in records[SHAPES]["models"].items():
        found = (fitting(name, model["config"], machine) for machine in MACHINES.values())
        lines.append(
            [
                f"`{name}`",
                *(NONE_FITS if one is None else f"{one[0]}: {one[1]:.1f}" for one in found),
            ]
        )
    return markdown(lines)
