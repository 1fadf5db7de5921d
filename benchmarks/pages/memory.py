"""The page of memory: its table, by the calculator."""

from copy import deepcopy
from functools import cache

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from benchmarks.markdown import markdown
from benchmarks.pages.sources import Records
from benchmarks.training_shapes import ONE_B, llama
from fastp3o.config import TrainableConfig
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.trainable import choose_trainable
from fastp3o.packing.pack import Packing
from fastp3o.runtime.precision import choose_precision
from fastp3o.training.predicted_memory import (
    Lengths,
    Memory,
    Model,
    OptimizerName,
    frozen_memory,
    together,
    update_memory,
)

EIGHT_B = llama(4096, 14336, 32, 32, 8, 128256)
EIGHT_B.tie_word_embeddings = False
HALF_B = Qwen2Config(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
)
MODELS: dict[str, PretrainedConfig] = {"0.5 B": HALF_B, "1.2 B": ONE_B, "8 B": EIGHT_B}
ALL = TrainableConfig()
TOP = TrainableConfig(trainable_layers=2)
LORA = TrainableConfig(lora_rank=16)
# What trains, whether activations are computed again, and what else saves memory.
WAYS: dict[str, tuple[TrainableConfig, bool, bool]] = {
    "all": (ALL, False, False),
    "all, checkpointed": (ALL, True, False),
    "all, checkpointed, `adamw_8bit`, offloaded": (ALL, True, True),
    "top two layers": (TOP, False, False),
    "LoRA of rank 16, checkpointed": (LORA, True, False),
}
LENGTHS = {
    "one pair of 350 + 2 × 40 tokens": Lengths.full_row(Packing(430), prompt=350, response=40),
    "of 1024 + 2 × 256": Lengths.full_row(Packing(1536), prompt=1024, response=256),
    "rows of 8192 tokens": Lengths.full_row(Packing(8192), prompt=350, response=40),
}
NOTHING = Memory(0, 0, 0)


@cache
def sizes(name: str, trains: TrainableConfig) -> Model:
    with torch.device("meta"):
        policy = PackedModel(AutoModelForCausalLM.from_config(deepcopy(MODELS[name])))
        choose_trainable(policy, trains)
    return Model(policy, trains.trainable_layers)


def update(
    model: Model, lengths: Lengths, *, lora: bool, checkpointing: bool, saves: bool
) -> float:
    """GB of an update in fp16 beside the reference."""
    precision = choose_precision("fp16", "fp16")
    optimizer: OptimizerName = "adamw_8bit" if saves else "adamw"
    policys = update_memory(
        model, lengths, precision, optimizer=optimizer, checkpointing=checkpointing
    )
    frozen = frozen_memory(model, lengths, precision)
    return together(policys, frozen, NOTHING, second=not lora, offload=saves)[0].peak / 1e9


def fits(records: Records) -> str:
    lines = [["parameters", "trains", *LENGTHS]]
    for name in MODELS:
        for way, (trains, checkpointing, saves) in WAYS.items():
            model = sizes(name, trains)
            options = {"lora": trains is LORA, "checkpointing": checkpointing, "saves": saves}
            lines.append(
                [name, way, *(f"{update(model, one, **options):.1f}" for one in LENGTHS.values())]
            )
    return markdown(lines)
